# SPDX-License-Identifier: Apache-2.0
"""Ask a server of ours with the `openai` package, and print the answer as it comes.

spexis serve MODEL --exit-model ADAPTER --pipeline-parallel-size 2 --port 8000
python examples/client.py "Why is the sky blue?"
"""

import argparse
import sys

import openai


def main(argv: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args(argv)
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": args.question}],
        max_tokens=args.max_tokens,
        temperature=0,
        stream=True,
    )
    answer = ""
    for piece in stream:
        text = piece.choices[0].delta.content or ""
        answer += text
        print(text, end="")
        sys.stdout.flush()
    print()
    return answer


if __name__ == "__main__":
    main()
