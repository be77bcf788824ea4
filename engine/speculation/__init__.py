"""Drafts: guesses of the next tokens, checked many at once by the model, so that a step can yield several tokens.

    sources (ngram, echo, forced, replay) ─▶ Speculator.propose ─▶ Chunk.drafts ─▶ one forward ─▶ verify.standing
                          Controller: how many, from measured acceptance and step times ◀─ Speculator.verified, stepped

Sources stand in Python and, where there is a compiler, together in native code (`native_sources`), which steps of a
quarter of a millisecond need. Where sources differ, their guesses may share a row as a tree (`merge`, `tree`): siblings
are guesses of the same token.

A draft never changes what a request says: every token is drawn as without drafts, with its own noise, penalties and
masks, and the guesses only decide how many of the drawn tokens one step keeps (docs/performance.md, "Speculation").
"""
