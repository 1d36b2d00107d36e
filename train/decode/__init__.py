"""Lossless decoding with a draft: proposals, verification, rounds."""
