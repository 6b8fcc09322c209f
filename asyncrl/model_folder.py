"""What can be known of a model before it is loaded. A model is a folder, a URL of one, or a name on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.storage import local_model

HUB_TIMEOUT_S = 3.0


def check_model(model: str, *, key: str, weights: bool = True) -> Any:
    """Return the configuration of transformers (Any: a vendor's) of a model that can be loaded, as far as can be seen.

    Of a folder the files and their headers are checked, of a URL the files without weights, which are fetched; of a
    name on the hub that it is in the cache or can be reached. Without ``weights`` the configuration is enough.

    Raises:
        ConfigError: it cannot be loaded, with the reason under the configuration's ``key``.
    """
    given, model = model, local_model(model, weights=False)
    folder = Path(model)
    if folder.is_dir():
        reason = _lacks(folder, weights=weights and model == given)
    elif folder.suffix == ".gguf":
        reason = f"a GGUF file is no model folder; write gguf:{model}"
    elif folder.exists() or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        reason = "no such folder; give a folder with config.json and weights, or a name on the hub"
    else:
        reason = _unreachable(model)
    if not reason:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(model)
        except Exception as error:  # noqa: BLE001  what the files say may break anything in transformers
            reason = f"transformers does not know this model: {_first_line(error)}"
    raise ConfigError(f"{key} = {model!r}: {reason}", path=key, remedy=reason.partition("; ")[2])


@dataclass(frozen=True, slots=True)
class RotaryChange:
    """Rotary positions of a ``kind`` whose frequencies are others in rows of more than ``tokens``.

    transformers chooses them for all rows of a call together, by the longest one, or by earlier calls, too.
    """

    kind: str
    tokens: int


def rotary_change(settings: Any) -> RotaryChange | None:
    """Return the first change that longer rows make to a model's rotary positions; None if they are always the same.

    ``settings`` are those that :func:`check_model` returns.
    """
    text = settings.get_text_config()
    whole = getattr(text, "rope_parameters", None) or {}
    found: list[RotaryChange] = []
    for each in (whole, *whole.values()):  # those of all layers, or of each kind of them
        kind = each.get("rope_type") if isinstance(each, dict) else None
        if kind == "longrope" and each["short_factor"] != each["long_factor"]:
            found.append(RotaryChange(kind, int(each["original_max_position_embeddings"])))
        elif kind == "dynamic":
            found.append(RotaryChange(kind, int(text.max_position_embeddings)))
    return min(found, key=lambda change: change.tokens, default=None)


def _lacks(folder: Path, *, weights: bool) -> str:
    """Return why a folder is no model's, or ""."""
    remedy = "; give the folder of a model, as `save_pretrained` and `asyncrl export` write it"
    if not (folder / "config.json").is_file():
        return f"the folder has no config.json{remedy}"
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not weights:
        return ""
    if not files:
        return f"the folder has no weights (*.safetensors){remedy}"
    from safetensors import SafetensorError, safe_open

    for file in files:
        if file.suffix == ".safetensors":
            try:
                with safe_open(str(file), framework="pt"):
                    pass
            except (SafetensorError, OSError) as error:
                return f"{file.name} is damaged: {_first_line(error)}; copy or download it again"
    return ""


def _unreachable(name: str) -> str:
    """Return why a model of the hub cannot be read, or ""."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return ""
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT_S)
    except HFValidationError:
        return "neither a folder nor a name on the hub; write a folder, owner/name, or gguf:FILE"
    except RepositoryNotFoundError:
        return "no such folder, and no such model on the hub (or it needs a token); check the name and HF_TOKEN"
    except Exception as error:  # noqa: BLE001  the network and the library may raise anything
        return (
            f"no such folder, and the hub cannot be asked ({type(error).__name__}: {_first_line(error)}); "
            "give a folder, or connect to the hub (HF_ENDPOINT, HF_HUB_OFFLINE) "
        ).rstrip()
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
