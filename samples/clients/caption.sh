#!/bin/sh
# Describes pictures with curl: sh caption.sh picture.jpg [another.png …]
set -eu
url="${BEHOLDER_URL:-http://127.0.0.1:8000}"
[ $# -gt 0 ] || { echo "usage: sh caption.sh picture.jpg [another.png …]" >&2; exit 2; }

# One picture is the whole body; the words appear as they are said.
curl --fail-with-body -sSN -H 'Content-Type: application/octet-stream' --data-binary "@$1" \
    "$url/v1/captions?stream=true&format=text"

# Several go into a form and are looked at together; the answer is JSON.
if [ $# -gt 1 ]; then
    for file in "$@"; do
        set -- "$@" -F "file=@$file"
        shift
    done
    curl --fail-with-body -sS "$@" -F 'prompt=What differs between the pictures?' "$url/v1/captions"
    echo
fi
