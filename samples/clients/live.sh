#!/bin/sh
# Asks about a picture over WebSocket, with no program but a command-line client: sh live.sh picture.jpg [question]
#
# A line is a message. websocat (https://github.com/vi/websocat) does that, and so does the command that comes with
# Python's websockets; WEBSOCKET_CLIENT chooses. The binary /v1/stream wants a program: live.py, live.mjs.
set -eu
url="${BEHOLDER_URL:-http://127.0.0.1:8000}"
[ $# -gt 0 ] || { echo "usage: sh live.sh picture.jpg [question]" >&2; exit 2; }
client="${WEBSOCKET_CLIENT:-$(command -v websocat || command -v websockets || true)}"
[ -n "$client" ] || { echo "neither websocat nor websockets is on the path: pip install websockets" >&2; exit 2; }
question="$(printf '%s' "${2:-Describe the picture.}" | sed 's/[\\"]/\\&/g')" # as JSON has it
{
    printf '{"type": "input_image_buffer.append", "image": "%s"}\n' "$(base64 <"$1" | tr -d '\n')"
    printf '{"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "%s"}]}}\n' "$question"
    printf '{"type": "response.create"}\n'
    sleep "${SECONDS_TO_WAIT:-5}" # the connection ends with the input
} | "$client" "ws${url#http}/v1/realtime" | sed -n 's/.*"type": *"response.output_text.done".*"text": *"\(.*\)"}.*/\1/p' | sed 's/\\n/ /g; s/\\\(["\\]\)/\1/g' # out of JSON again
