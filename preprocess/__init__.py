"""Media stage: bytes and chat messages become token ids and uint8 pixels, and token ids become text again.

Nothing imported by a preprocess worker or the detokenizer may import torch; `vision/` and `blocks/` do, and only the
engine loads them.
"""
