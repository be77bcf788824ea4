"""The detokenizer process, whose start can be held up."""

from __future__ import annotations

from held import wait_for_start

from preprocess import detokenizer

if __name__ == "__main__":
    wait_for_start()
    detokenizer.main()
