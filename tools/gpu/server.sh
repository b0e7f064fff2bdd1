# A shell function that the other scripts in this folder share; they source this file.

# Arguments: port, process id, log file. Waits until the server answers. If it exits, or does not answer within ten
# minutes, prints the end of its log and fails.
wait_for_server() {
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
