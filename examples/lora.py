"""Adapt a causal language model with LoRA (Hu et al. 2022). Only the adapters are trained and sent.

    pip install transformers peft
    python examples/lora.py

The mean of the matrices B times the mean of the matrices A is not the mean of the products B·A. If A is frozen (--freeze-a: FFA-LoRA,
Sun et al. 2024), averaging is exact, and half as many numbers are sent.
"""

import copy
import sys
from functools import cache

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fedcomp

WORDS, LENGTH = 64, 32
CONFIG = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def texts(count: int, step: int, seed: int) -> fedcomp.Data:
    """Return sequences that count upwards in steps. The targets are the tokens; the model shifts them."""
    first = torch.randint(0, WORDS, (count, 1), generator=torch.Generator().manual_seed(seed))
    words = (first + step * torch.arange(LENGTH)) % WORDS
    return fedcomp.Data({"input_ids": words, "labels": words}, words)


@cache
def pretrained() -> LlamaForCausalLM:
    """Return a base model that counts in steps of one, instead of a downloaded one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for seed in range(100):
        optimizer.zero_grad()
        model(**texts(32, step=1, seed=seed).inputs).loss.backward()
        optimizer.step()
    return model


def main(a_frozen: bool = "--freeze-a" in sys.argv) -> None:
    def model() -> PeftModel:
        adapted = get_peft_model(copy.deepcopy(pretrained()), LORA)
        for name, parameter in adapted.named_parameters():
            if a_frozen and "lora_A" in name:
                parameter.requires_grad_(False)
        return adapted

    train, test = texts(400, step=2, seed=1000), texts(50, step=2, seed=1001)
    run = fedcomp.simulate(
        fedcomp.Task("lora", model, train, test, accuracy=None),
        clients=10,
        participation=0.5,
        rounds=20,
        local_steps=10,
        optimizer="adamw:lr=1e-2",
        uplink="topk:density=10%",
        progress=False,
    )
    run.model().save_pretrained(f"{run.folder}/adapter")  # in the format of peft
    loaded = PeftModel.from_pretrained(copy.deepcopy(pretrained()), f"{run.folder}/adapter")
    trained = sum(p.numel() for p in model().parameters() if p.requires_grad)
    print(f"loss {run.metrics['loss'][0]:.2f} → {run.metrics['loss'][-1]:.2f}")
    print(f"{trained:,} of {loaded.num_parameters():,} parameters are sent; {run.folder}/adapter")


if __name__ == "__main__":
    main()
