"""What decides an engine's results and has no short name: digests of the model's configuration, of
weights, of adapters.

All of them are computed from what the engine loads. A digest that a user gives is compared with
the computed one, never believed.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import files
from .wire import Failure

log = logging.getLogger("pf_connector")

VOLATILE = {
    "_name_or_path": "where the files lie: the digest of the weights says which they are",
    "name_or_path": "as _name_or_path",
    "_commit_hash": "the revision of the hub that the files came from: their contents are hashed",
    "transformers_version": "the version that wrote the file: the version that runs is in `engine`",
    "_attn_implementation_autoset": "how the attention was chosen: which it is, is in `backend` or `attention`",
    "auto_map": "names of the model's own code with the repository or path they came from: the code is hashed with the weights",
}
"""Keys of a model's configuration that are left out at every depth, and why. Everything else
counts."""

KINDS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Files of weights, the preferred kind first, as engines look for them."""
_TRAINING = ("training_args.", "optimizer.", "scheduler.", "scaler.")
_INDEX = "model.safetensors.index.json"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Unidentified(Failure):
    """Something that decides the engine's results could not be identified, or is not what was
    said. Nothing may be captured."""

    def __init__(self, detail: str) -> None:
        super().__init__("fingerprint_mismatch", detail)


def configuration(model: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Digest of a model's resolved configuration (`to_dict()`, after all overrides) and of the
    engine's settings, as canonical JSON.

    Raises `Unidentified` if a value has no canonical form.
    """
    document = {"model": plain(model, "model"), "settings": plain(settings, "settings")}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    digest = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    log.info("model configuration: %s", digest)
    # Comparing these lines shows what differs between two engines.
    log.debug("model configuration in full: %s", text)
    return digest


def plain(value: Any, where: str = "") -> Any:
    """A value as JSON has it, without the keys of `VOLATILE`. Raises `Unidentified`."""
    if value is None or isinstance(value, (str, bool, int)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(inner, f"{where}.{key}") for key, inner in value.items() if key not in VOLATILE}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(inner, where) for inner in value), key=lambda inner: json.dumps(inner, sort_keys=True))
    if isinstance(value, (list, tuple)):
        return [plain(inner, f"{where}[{at}]") for at, inner in enumerate(value)]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "to_dict"):
        return plain(value.to_dict(), where)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), f"{where}.{field.name}") for field in dataclasses.fields(value)}
    raise Unidentified(f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which has no canonical form")


def weights(place: str | Path, given: str = "", code: bool = False, kinds: Sequence[str] = KINDS) -> str:
    """Digest of the weights in a folder or file: that of the lines `sha256sum` prints for the
    files, sorted by name.

    `given` is what a user expects. With `code`, the model's own Python files count too. `kinds` are
    patterns of files that the engine loads, the preferred one first. Raises `Unidentified` if the
    files cannot be read, or are not those expected.
    """
    place = Path(place)
    try:
        found = _weight_files(place, kinds)
        if code and place.is_dir():
            found = sorted([*found, *place.glob("*.py")])
        digest = _digest_of(found, f"weights in {place}")
    except (OSError, ValueError) as error:
        raise Unidentified(f"the weights in {place} cannot be read: {error}") from error
    return expected(digest, given, f"the weights in {place}")


def code(folder: Path) -> str:
    """Digest of the Python files in a folder: a model's own code. Raises `Unidentified`."""
    try:
        return _digest_of(sorted(folder.glob("*.py")), f"code in {folder}")
    except OSError as error:
        raise Unidentified(f"the code in {folder} cannot be read: {error}") from error


def expected(digest: str, given: str, what: str) -> str:
    """`digest`, if it is the one given or none is. Raises `Unidentified`."""
    if given and given != digest:
        hint = "" if _DIGEST.fullmatch(given) else "; leave the setting out, or give this digest"
        raise Unidentified(f"{what} are {digest}, the setting `weights` says {given!r}{hint}")
    return digest


def adapter(place: str | Path) -> str:
    """Digest of an adapter's files: its configuration and its weights. Raises `Unidentified`."""
    place = Path(place)
    try:
        found = adapter_files(place)
        return _digest_of(found, f"adapter in {place}")
    except OSError as error:
        raise Unidentified(f"the adapter in {place} cannot be read: {error}") from error


def adapter_files(place: Path) -> list[Path]:
    """The files that make up an adapter. Raises `OSError`."""
    found = [file for pattern in ("adapter_config.json", *KINDS[:4]) for file in sorted(place.glob(pattern))]
    found = sorted(file for file in found if not file.name.startswith(_TRAINING))
    if not any(file.suffix != ".json" for file in found):
        raise FileNotFoundError(f"no files of weights in {place}")
    return found


def tensors(named: Iterable[tuple[str, Any]], given: str = "") -> str:
    """Digest of a model's tensors in host memory (`state_dict().items()`): names, types, shapes,
    bytes. Raises `Unidentified`."""

    def line(item: tuple[str, Any]) -> str:
        name, tensor = item
        if not hasattr(tensor, "untyped_storage") or str(tensor.layout) != "torch.strided" or tensor.device.type != "cpu":
            raise Unidentified(f"{name} is not a plain tensor in host memory")
        import torch

        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{hashlib.sha256(data).hexdigest()}  {tensor.dtype} {list(tensor.shape)} {name}\n"

    with ThreadPoolExecutor(thread_name_prefix="pf-weights") as pool:
        lines = sorted(pool.map(line, named))
    if not lines:
        raise Unidentified("the model has no tensors")
    return expected("sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest(), given, "the weights in memory")


def _weight_files(place: Path, kinds: Sequence[str]) -> list[Path]:
    if not place.is_dir():
        return [place]
    if KINDS[0] in kinds and (index := place / _INDEX).exists():
        document = json.loads(index.read_bytes())
        named = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(named, dict):
            raise ValueError(f"{index.name} names no files")
        # Engines load what the index names. A few prefer Mistral's own files if these lie there
        # too.
        return sorted({*(place / str(name) for name in named.values()), *place.glob("consolidated*.safetensors")})
    for kind in kinds:
        if found := sorted(file for file in place.glob(kind) if not file.name.startswith(_TRAINING)):
            return found
    raise FileNotFoundError("no files of weights")


def _digest_of(found: list[Path], what: str) -> str:
    lines = [f"{digest}  {file.name}\n" for file, digest in zip(found, files.digests(found, what), strict=True)]
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()
