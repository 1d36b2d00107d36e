"""Configuration roots, one per verb, and their groups (needed for pkg://configs)."""
