#!/usr/bin/env bash
# Publish all packages of this repository and a scaffolded environment, to a server with a password and to a static
# index. Then, from each of the two, install the environments by name and version into a clean virtual environment, and
# evaluate them there.
#
#     bash tools/publish_and_install.sh [WORK_DIR]
#
# Needs a synced checkout, and a package registry for third-party dependencies; plumbob's own packages come only from
# the two indexes on this machine.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=${1:-$(mktemp -d)}
port=8765
here=$root/.venv/bin
password=$($here/python -c 'import secrets; print(secrets.token_hex(12))')
server=http://127.0.0.1:$port/simple/
mkdir -p "$work/packages" && cd "$work"

$here/python -c "
from passlib.apache import HtpasswdFile
from passlib.hash import sha256_crypt
file = HtpasswdFile('$work/htpasswd', new=True)
file.set_hash('ci', sha256_crypt.using(rounds=1000).hash('$password'))
file.save()"
$here/pypi-server run -i 127.0.0.1 -p $port -P htpasswd -a update,download,list --disable-fallback --hash-algo sha256 packages \
    >server.log 2>&1 &
trap 'kill %1 2>/dev/null || true' EXIT
sleep 3

export UV_PUBLISH_USERNAME=ci UV_PUBLISH_PASSWORD=$password
export UV_INDEX_PLUMBOB_USERNAME=ci UV_INDEX_PLUMBOB_PASSWORD=$password
$here/hub new my-env
libraries=("$root"/packages/{console,doctor,hub,lab,rollout,retrieval} "$root"/trainer)
environments=("$root"/environments/{gsm8k,lookup,musique} my-env)
for index in "$server" ./static; do
    echo "== publish to $index"
    $here/hub publish "${libraries[@]}" "${environments[@]}" --index "$index"
done

for index in "$server" ./static; do
    venv=clean-$(basename "${index%/simple/}" | tr -c 'a-z0-9\n' -)
    echo "== $venv: install from $index"
    uv venv -q --python "$here/python" "$venv"
    # The libraries are installed by uv, with the hub's index first; the environments by vf-install.
    where=$index
    [ -d "$index" ] && where=$(cd "$index" && pwd)/simple
    uv pip install -q --python "$venv/bin/python" --index "plumbob=$([ -d "$index" ] && echo "file://$where" || echo "$where")" \
        plumbob-hub==0.1.0 plumbob-trainer==0.1.0
    "$venv/bin/vf-install" gsm8k==0.1.0 lookup==0.1.0 vf-musique==0.1.0 my-env==0.1.0 --index "$index"
    "$venv/bin/hub" list
    "$venv/bin/evaluate" gsm8k lookup musique my-env --oracle -n 32 -a gsm8k.datasets=synthetic -a musique.datasets=synthetic \
        --run-name "oracle-$venv" 2>/dev/null | grep -E "tasks x|^reward"
    "$venv/bin/evaluate" lookup -n 64 --run-name "tiny-$venv" 2>/dev/null | grep -E "tasks x|^reward"
done
! grep -rl "$password" --include='*' "$work"/clean-*/lib/python*/site-packages/*.dist-info static evaluations server.log
echo "the password is in no installed metadata, index, result or log"
