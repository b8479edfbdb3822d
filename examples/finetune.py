"""Fine-tunes a causal language model on conversations: all weights or, with --lora, an adapter."""

import argparse
import itertools
import sys
import time
from pathlib import Path

import transformers

import roundpipe
from roundpipe.data.balance import balanced_config
from roundpipe.data.batches import Batches, check_positions
from roundpipe.data.chat import load_chat, load_tokenizer, padding_token_id
from roundpipe.huggingface.evaluation import held_out_loss
from roundpipe.ops.packed_attention import check_packing


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of the model and its tokenizer, or its name on the Hub")
    parser.add_argument("chat", help='JSONL file, a line {"messages": [...]} or {"prompt": ..., "completion": ...}')
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train a LoRA adapter of this rank, not all weights")
    parser.add_argument("--lr", type=float, default=2e-5, help="highest learning rate; LoRA takes about ten times more")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="stop after this many steps; 0 only measures and saves")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="tokens of a step")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a row; longer conversations are cut")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the conversations to hold out, or 0")
    parser.add_argument(
        "--save-every", type=int, metavar="STEPS", help="save a checkpoint so often, in OUT/checkpoints"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in OUT/checkpoints")
    parser.add_argument("--no-packing", dest="packed", action="store_false", help="give each conversation its own row")
    options = parser.parse_args()
    if options.lora is not None and options.lora < 1:
        parser.error(f"--lora is {options.lora}, expected a rank of at least 1; leave it out to train all weights")
    if options.save_every is not None and options.save_every < 1:
        parser.error(f"--save-every is {options.save_every}, expected at least 1")
    return options


def finetune(options: argparse.Namespace) -> None:
    transformers.set_seed(0)  # adapters begin at random
    tokenizer = load_tokenizer(options.model)
    data = load_chat(options.chat, tokenizer, held_out=options.held_out)
    sizes = {"batch_tokens": options.batch_tokens, "max_length": options.max_length, "packed": options.packed}
    sizes["pad_token_id"] = padding_token_id(tokenizer)
    train = Batches(data.train, epochs=options.epochs, seed=0, **sizes)
    held_out = Batches(data.held_out, **sizes) if data.held_out else []
    steps = len(train) if options.steps is None else min(len(train), options.steps)
    adapters = None
    if options.lora is not None:
        from peft import LoraConfig

        adapters = LoraConfig("CAUSAL_LM", r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear")
    attention = {"attn_implementation": "packed"} if options.packed else {}
    model = roundpipe.from_pretrained(options.model, peft_config=adapters, **attention)
    check_positions(model, train, held_out)
    if options.packed:
        check_packing(model)
    optimizer = roundpipe.optim.AdamW(model, lr=options.lr, decay_norms_and_biases=False)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    checkpoints = Path(options.out) / "checkpoints"
    saved = {"lr_scheduler": schedule, "state": {"data": train}}
    done = 0
    if options.resume and roundpipe.latest(checkpoints):
        done = roundpipe.load_checkpoint(checkpoints, model, optimizer, **saved).step
    elif held_out:
        print(f"held-out loss before {held_out_loss(model, held_out):.4f}", flush=True)
    journal = roundpipe.RunJournal(checkpoints, after_step=done) if options.save_every else None
    model.train()
    with roundpipe.StopSignal() as stop:
        for step, batch in enumerate(itertools.islice(train, steps - done), start=done + 1):
            start = time.perf_counter()
            loss = model.forward_backward(input_kwargs=batch, run_config=balanced_config(batch))
            model.step(optimizer, max_grad_norm=1.0, lr_scheduler=schedule)  # overlaps with the next batch
            speed = batch["input_ids"].numel() / (time.perf_counter() - start)
            print(f"step {step}/{steps}  loss {float(loss):.4f}  {speed:.0f} tokens/s", flush=True)
            if journal:
                journal.record(step, loss=float(loss))
                if step % options.save_every == 0 or stop.requested:
                    roundpipe.save_checkpoint(checkpoints, model, optimizer, step=step, keep_last=2, **saved)
            if stop.requested:
                print("interrupted, saving what has been learnt")
                break
    if held_out:
        print(f"held-out loss after {held_out_loss(model, held_out):.4f}")
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    try:
        finetune(arguments())
    except (ImportError, ValueError) as error:
        sys.exit(f"finetune: {error}")
