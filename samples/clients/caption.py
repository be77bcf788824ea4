"""Describes a picture with Python's own library: python caption.py picture.jpg [question]"""

import base64
import json
import os
import sys
import urllib.error
import urllib.request

URL = os.environ.get("BEHOLDER_URL", "http://127.0.0.1:8000")


def events(response):
    """The JSON of every server-sent event until the stream's end."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with open(sys.argv[1], "rb") as file:
        picture = base64.b64encode(file.read()).decode()
    body = {"image": picture, "stream": True}
    if len(sys.argv) > 2:
        body["prompt"] = sys.argv[2]
    request = urllib.request.Request(
        f"{URL}/v1/captions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            for event in events(response):
                if "error" in event:  # the stream failed in the middle
                    sys.exit(f"\n{event['error']['message']}")
                if event["object"] == "caption.chunk":
                    print(event["text"], end="", flush=True)
                else:  # the last event is the whole answer
                    print()
                    print(json.dumps(event["timings"]), file=sys.stderr)
    except urllib.error.HTTPError as refusal:
        sys.exit(json.load(refusal)["error"]["message"])
    except urllib.error.URLError as error:
        sys.exit(f"no answer from {URL}: {error.reason}")


if __name__ == "__main__":
    main()
