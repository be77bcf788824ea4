"""Keys and values of attention as one-token slots: who owns which slot, and which prefixes can be used again."""
