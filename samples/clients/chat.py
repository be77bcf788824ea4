"""Asks two questions about one picture with the openai client: python chat.py picture.jpg [question] [question]

(pip install openai)
"""

import base64
import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("BEHOLDER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("BEHOLDER_KEY", "none"),
)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with open(sys.argv[1], "rb") as file:
        picture = "data:application/octet-stream;base64," + base64.b64encode(file.read()).decode()
    questions = sys.argv[2:] or ["What is in the picture?", "Which colours does it have?"]
    model = client.models.list().data[0].id
    messages = []
    for question in questions:
        parts = [] if messages else [{"type": "image_url", "image_url": {"url": picture}}]
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": question}]})
        stream = client.chat.completions.create(
            model=model, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        answer = ""
        print(f"> {question}")
        for chunk in stream:
            if chunk.choices:
                text = chunk.choices[0].delta.content or ""
                answer += text
                print(text, end="", flush=True)
            else:
                usage = chunk.usage
                cached = usage.prompt_tokens_details.cached_tokens
                print(f"\n({usage.prompt_tokens} prompt tokens, {cached} of them computed before)")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
