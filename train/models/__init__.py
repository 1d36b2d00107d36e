"""The draft models: backbone, sequential heads, confidence head."""
