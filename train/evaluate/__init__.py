"""Evaluation of drafts by real decoding, and what is reported of it."""
