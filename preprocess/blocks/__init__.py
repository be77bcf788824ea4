"""Torch building blocks that encoders and language models share. Preprocess workers import none of it but
`fields`, which needs no torch.
"""
