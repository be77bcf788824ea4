"""What `beholder bench` measures, one file a kind; `command.py` lists them."""
