"""Exported checkpoints: writing them for the engines, and checking what was written."""
