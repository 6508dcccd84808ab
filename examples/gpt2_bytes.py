"""Trains a small GPT-2 on the bytes of a text that comes with Python: the help pages in `pydoc_data.topics`.

    rannc-run -np 2 examples/gpt2_bytes.py --layers 4 --embd 128

The model is Hugging Face's, randomly initialised: its input and output embeddings are tied, and it computes its loss
itself. Each rank draws its own samples. Losses are in nats per byte, averaged over the samples of all ranks.
"""

import argparse
import pydoc_data.topics

import torch

import pyrannc

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    raise SystemExit("this example needs transformers: pip install '.[examples]'") from None

HELD_OUT = 0.05
"""Fraction of the text, at its end, that is held out for evaluation."""


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--embd", type=int, default=128, help="width of the model")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128, help="bytes per sample")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.embd % args.heads:
        parser.error(f"--embd {args.embd} is not a multiple of --heads {args.heads}")
    for name in ("layers", "seq", "batch", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is less than 1")
    return args


def read_text():
    """Return all help pages as one tensor of bytes."""
    pages = (text for _, text in sorted(pydoc_data.topics.topics.items()))
    return torch.frombuffer(bytearray("\n".join(pages).encode()), dtype=torch.uint8).long()


def sample(text, count, length, generator, device):
    """Draw `count` windows of `length` bytes from random positions."""
    starts = torch.randint(0, len(text) - length, (count,), generator=generator).tolist()
    return torch.stack([text[start : start + length] for start in starts]).to(device)


def main():
    args = parse()
    rank = pyrannc.get_rank()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = read_text()
    held_out_at = int(len(text) * (1 - HELD_OUT))
    training, held_out = text[:held_out_at], text[held_out_at:]
    if args.seq >= len(held_out):
        raise SystemExit(f"--seq {args.seq} is too long: only {len(held_out)} bytes are held out; use a smaller one")

    torch.manual_seed(args.seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=args.seq,
        n_embd=args.embd,
        n_layer=args.layers,
        n_head=args.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # avoids a warning of transformers
    if rank == 0:
        print(f"#Parameters={sum(p.numel() for p in model.parameters())} #Bytes={len(training)}", flush=True)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    model = pyrannc.RaNNCModule(model, opt)

    generator = torch.Generator().manual_seed(1_000_003 * args.seed + rank)
    for step in range(args.steps):
        tokens = sample(training, args.batch, args.seq, generator, device)
        opt.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        opt.step()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step={step} loss={loss.item():.4f}", flush=True)

    model.eval()
    generator = torch.Generator().manual_seed(rank)
    losses = []
    with torch.no_grad():
        for _ in range(4):
            tokens = sample(held_out, args.batch, args.seq, generator, device)
            losses.append(model(input_ids=tokens, labels=tokens).loss.item())
    if rank == 0:
        print(f"held-out loss={sum(losses) / len(losses):.4f}", flush=True)
    print(f"Finished on rank{rank}", flush=True)


if __name__ == "__main__":
    main()
