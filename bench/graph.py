"""Benchmarks of the tracing front-end: tracing, loading a cached trace, hashing the graph, and very large models.

    python bench/graph.py [--layers 150] [--rounds 5] [--no-large]

Runs in one thread. 'cached' is everything that a repeated run does instead of tracing: fingerprint of the model,
decoding, hash. Each large model is built on the meta device in a separate process, to measure its peak memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _results import Spread, Table, found, note

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
LARGE = ("llama-70b", "gpt3-175b")
ROWS, SEQUENCE = 2, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=150, help="layers of the GPT-2 that is stored and loaded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-large", action="store_true", help="skip the large models")
    parser.add_argument("--only", choices=LARGE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        large(options.only)
        return
    stored(options.layers, options.rounds)
    for width, sequence in ((128, 64), (768, 128)):
        compared(options.rounds, width, sequence)
    for name in () if options.no_large else LARGE:
        subprocess.run([sys.executable, __file__, "--only", name], check=True)


def _gpt2(layers: int) -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_positions=32, n_embd=8, n_layer=layers, n_head=2, use_cache=False, bos_token_id=0,
            eos_token_id=1,
        )
    )  # fmt: skip


def _call(model: Any, rows: int, sequence: int) -> tuple[Any, list[Any]]:
    """Signature and tensors of a training call."""
    import torch

    from rannd.graph.call.signature import Mode, classify, flatten_call

    ids = torch.randint(3, 50, (rows, sequence))
    call = flatten_call((), {"input_ids": ids, "labels": ids})
    home = next(model.parameters()).device
    signature = classify(call, Mode.current(model.training), [call.shapes()])
    return signature, [tensor.to(home) for tensor in call.tensors]


def _times(action: Callable[[], Any], rounds: int) -> Spread:
    """Time an action, in milliseconds."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return Spread.of(taken, 1e3)


def stored(layers: int, rounds: int) -> None:
    """Measure tracing, encoding and loading of a deep GPT-2."""
    import torch

    from rannd.graph.fingerprint.fingerprint import fingerprint
    from rannd.graph.model import build
    from rannd.graph.partition.graph_hash import graph_hash
    from rannd.graph.stored.codec import decode, encode
    from rannd.graph.tracing.frontend import trace

    model = _gpt2(layers).train()
    signature, tensors = _call(model, 4, 16)
    start = time.perf_counter()
    traced, signature = trace(model, signature, tensors, torch.device("cpu"))
    first = (time.perf_counter() - start) * 1e3
    data = encode(traced, signature.fixed_rows)
    nodes = len(traced.graph.nodes)

    def cached() -> None:
        fingerprint(model, signature, torch.device("cpu"))
        loaded, _ = decode(data, model)
        graph_hash(loaded, signature, model)

    table = Table(
        f"GPT-2 of {layers} layers, {nodes:,} nodes, stored in {len(data):,} bytes", "what", ("time", "{:,.1f} ms")
    )
    tracing = _times(lambda: trace(model, signature, tensors, torch.device("cpu")), min(rounds, 3))
    table.row("trace", tracing)
    table.row("trace, the first in the process", first)
    loading = _times(cached, rounds)
    table.row(f"cached, {tracing.median / loading.median:.1f} times as fast as tracing", loading)
    for name, action in {
        "fingerprint": lambda: fingerprint(model, signature, torch.device("cpu")),
        "decode": lambda: decode(data, model),
        "hash": lambda: graph_hash(traced, signature, model),
        "encode": lambda: encode(traced, None),
    }.items():
        took = _times(action, rounds)
        table.row(name, took)
        if name == "hash":
            found("hash", took.median * 10_000 / nodes, f"from {nodes:,} nodes")
    home = tensors[0].device
    took = _times(lambda: build(model, signature, tensors, home, decode(data, model)[0]), rounds)
    table.row("decode, batch-dimension analysis, placement, task graph", took)


def compared(rounds: int, width: int, sequence: int) -> None:
    """Compare the time of verify_trace with that of tracing and of a training step, for a GPT-2 of 4 layers."""
    import torch
    import transformers

    from rannd.graph.comparison import compare, rows_to_compare
    from rannd.graph.model import build
    from rannd.graph.tracing import hook_proofs

    config = transformers.GPT2Config(
        vocab_size=512,
        n_positions=sequence,
        n_embd=width,
        n_layer=4,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def prove() -> None:
        hook_proofs._known.clear()
        assert not hook_proofs.failing()

    table = Table(
        f"verify_trace, GPT-2 of 4 layers, width {width}, {sequence} tokens", "rows of the mini-batch",
        ("step", "{:.0f} ms"), ("comparison", "{:.0f} ms"), ("in steps", "{:.2f}"), ("of tracing", "{:.1%}"),
    )  # fmt: skip
    for rows in (1, 2, 4, 16):
        signature, tensors = _call(model, rows, sequence)
        begun = time.perf_counter()
        graph = build(model, signature, tensors, tensors[0].device)
        tracing = time.perf_counter() - begun

        def step(tensors: list[Any] = tensors) -> None:
            optimizer.zero_grad()
            model(input_ids=tensors[0], labels=tensors[1]).loss.backward()
            optimizer.step()

        def check(graph: Any = graph, tensors: list[Any] = tensors) -> None:
            assert compare(model, graph, rows_to_compare(graph, tensors)) is None

        stepping, checking = _times(step, rounds), _times(check, rounds)
        share = checking.median / tracing / 1e3
        table.row(rows, stepping, checking, checking.median / stepping.median, share)
    note(f"check of all hooks into torch: {_times(prove, rounds).median:.1f} ms")


def _peak_kib() -> int:
    """Peak resident memory of this process in KiB (getrusage's value starts from the parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def large(name: str) -> None:
    """Trace a model on the meta device that is too large for the memory of one machine."""
    import torch
    import transformers

    from rannd.graph.model import build
    from rannd.graph.tracing.frontend import trace

    before = _peak_kib()
    with torch.device("meta"):
        if name == "llama-70b":
            config = transformers.LlamaConfig(
                hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                num_key_value_heads=8, vocab_size=32000,
            )  # fmt: skip
            model = transformers.LlamaForCausalLM(config).train()
        else:
            config = transformers.GPT2Config(n_positions=SEQUENCE, n_embd=12288, n_layer=96, n_head=96)
            model = transformers.GPT2LMHeadModel(config).train()
    signature, tensors = _call(model, ROWS, SEQUENCE)
    start = time.perf_counter()
    traced, signature = trace(model, signature, tensors, torch.device("cpu"))
    tracing = time.perf_counter() - start
    start = time.perf_counter()
    graph = build(model, signature, tensors, torch.device("cpu"), traced)
    building = time.perf_counter() - start
    peak = _peak_kib()
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    table = Table(
        "Models on the meta device", "model", ("10^9 parameters", "{:.0f}"), "nodes", ("trace", "{:.1f} s"),
        ("task graph", "{:.1f} s"), ("peak memory", "{:.2f} GiB"), ("before the model was built", "{:.2f} GiB"),
    )  # fmt: skip
    table.row(name, billions, len(graph.nodes), tracing, building, peak / 2**20, before / 2**20)


if __name__ == "__main__":
    main()
