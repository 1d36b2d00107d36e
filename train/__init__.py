"""The training side: draft models, objective, loop, decoding, evaluation and export."""
