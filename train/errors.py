"""What a user did wrong on the training side."""

from data.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or does not fit the configuration."""


class ExportError(UserError):
    """An export that cannot be written, or does not draft what the trainer's decoder drafts."""
