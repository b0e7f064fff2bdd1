# Sourced by the scripts beside it.

wait_for_server() { # port, process, log: fails, with the end of the log, if the server ends or says nothing for ten minutes
    local until=$((SECONDS + 600))
    while [ $SECONDS -lt $until ] && kill -0 "$2" 2>/dev/null; do
        if ${PYTHON:-python3} -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$1/health', timeout=2)" 2>/dev/null; then
            return 0
        fi
        sleep 1
    done
    tail -40 "$3"
    return 1
}
