"""The context contract: what every artefact carries, and every stage compares with its input's.

Training and serving that differ a little raise nothing: acceptance is just low. So the texts that
decide the context (template, probe renders, stop ids) are kept whole, and weights as a hash over
samples of every tensor. A moved folder changes nothing.
"""

import hashlib
import json
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from data.chat import Message, Tokenizer, render
from data.errors import FingerprintMismatchError, TargetError
from data.files import write_atomic
from data.target import Target, TargetFiles, tensor_files

# Rendered by every stage. They hold what templates treat apart: a default system prompt, several
# turns, and text at the edges.
PROBES: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "Name a prime."},),
    (
        {"role": "user", "content": " First?\n"},
        {"role": "assistant", "content": "Second."},
        {"role": "user", "content": "Third?"},
    ),
)
# config.json keys that say how a model was stored, not what it computes.
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
_SAMPLES, _SAMPLE_BYTES = 16, 4096


class Fingerprint:
    """Named texts. Two fingerprints match when the fields that both have are equal."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields = dict(fields)

    @classmethod
    def of_target(cls, target: Target | TargetFiles) -> "Fingerprint":
        """The fingerprint of a target and its tokenizer."""
        kept = _stable(target.model_config.to_diff_dict())
        return cls(
            {
                **tokenizer_fields(target.tokenizer),
                "stop_ids": json.dumps(list(target.stop_ids)),
                "target_config": json.dumps(kept, sort_keys=True, default=str),
                "target_weights": hash_weights(target.folder),
            }
        )

    @classmethod
    def load(cls, path: Path) -> "Fingerprint":
        """Reads what `save` wrote.

        Raises:
            FingerprintMismatchError: there is no fingerprint, or it is not one.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            content = str(error).encode()
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: bytes, where: str) -> "Fingerprint":
        """Reads the JSON form.

        Raises:
            FingerprintMismatchError: it is not a fingerprint.
        """
        try:
            fields = json.loads(content)
            return cls({str(k): str(v) for k, v in fields.items()})
        except (ValueError, AttributeError) as error:
            raise FingerprintMismatchError(
                f"{where}: no readable fingerprint ({error})\n"
                "  fix: run the stage that writes it again; without it a mismatch with serving "
                "would go unnoticed"
            ) from error

    def to_bytes(self) -> bytes:
        """The fields as JSON."""
        return (json.dumps(self.fields, indent=1, ensure_ascii=False) + "\n").encode()

    def save(self, path: Path) -> None:
        """Writes the fields as JSON."""
        write_atomic(path, self.to_bytes())

    def extended(self, **fields: str) -> "Fingerprint":
        """The fingerprint with more fields."""
        return Fingerprint({**self.fields, **fields})

    def require_match(
        self, other: "Fingerprint", here: str, there: str, allow: Collection[str] = ()
    ) -> None:
        """Compares the fields that both have.

        Raises:
            FingerprintMismatchError: names each field that differs, with both texts.
        """
        shared = [f for f in self.fields if f in other.fields and f not in allow]
        differing = [f for f in shared if self.fields[f] != other.fields[f]]
        if not differing:
            return
        lines = [f"{here} and {there} do not come from the same context:"]
        for name in differing:
            mine, theirs = self.fields[name], other.fields[name]
            at = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
                min(len(mine), len(theirs)),
            )
            lines.append(f"  {name} (first difference at character {at}):")
            lines.append(f"    {here}: {_excerpt(mine, at)}")
            lines.append(f"    {there}: {_excerpt(theirs, at)}")
        allowed = ",".join(differing)
        lines.append(
            f"  fix: redo the older of the two, or accept it with 'run.allow_mismatch=[{allowed}]'"
        )
        raise FingerprintMismatchError("\n".join(lines))


def _stable(config: Any) -> Any:  # noqa: ANN401 - JSON
    """A config without what says how a model was stored, in nested configs too."""
    if not isinstance(config, dict):
        return config
    return {k: _stable(v) for k, v in config.items() if k not in _VOLATILE}


def tokenizer_fields(tokenizer: Any) -> dict[str, str]:  # noqa: ANN401 - any transformers tokenizer
    """The fields that the tokenizer alone decides."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return {
        "tokenizer": hashlib.sha256(text.encode()).hexdigest(),
        "chat_template": str(tokenizer.chat_template),
        "probe_renders": json.dumps([render_probe(tokenizer, p) for p in PROBES]),
    }


def render_probe(tokenizer: Tokenizer, messages: tuple[Message, ...]) -> str:
    """The rendered prompt of one probe conversation."""
    return render(tokenizer, messages, True)


def hash_weights(folder: Path) -> str:
    """Hash over evenly spaced samples of every tensor's bytes (at most 64 KiB a tensor)."""
    files = tensor_files(folder)
    headers = {path: _read_header(path) for path in set(files.values())}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        data_start, header = headers[path]
        start, end = header[name]["data_offsets"]
        digest.update(json.dumps([name, header[name]["dtype"], header[name]["shape"]]).encode())
        room = max(end - start - _SAMPLE_BYTES, 0)
        with path.open("rb") as file:
            for i in range(_SAMPLES if room else 1):
                file.seek(data_start + start + room * i // max(_SAMPLES - 1, 1))
                digest.update(file.read(min(_SAMPLE_BYTES, end - start)))
    return digest.hexdigest()


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where a safetensors file's data begins, and its header."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
    return 8 + size, header


def check_mask_token(mask_token_id: int, vocab_size: int, stop_ids: Collection[int]) -> None:
    """Refuses a mask token that cannot work.

    Raises:
        TargetError: outside the embedding, or a stop token.
    """
    if not 0 <= mask_token_id < vocab_size:
        raise TargetError(
            f"target.mask_token_id={mask_token_id} is outside the embedding of {vocab_size} rows\n"
            "  fix: take an unused token of the target's vocabulary"
        )
    if mask_token_id in stop_ids:
        raise TargetError(
            f"target.mask_token_id={mask_token_id} is a stop token\n"
            "  fix: take a token that no answer holds"
        )


def _excerpt(text: str, at: int) -> str:
    return repr(text[max(0, at - 30) : at + 50])
