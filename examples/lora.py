"""Adapt a causal language model with LoRA (Hu et al. 2022): only the adapters are trained, and only they travel.

    pip install transformers peft
    python examples/lora.py

The mean of the As times the mean of the Bs is not the mean of the products B·A. With A frozen (--freeze-a: FFA-LoRA, Sun et al. 2024)
averaging is exact, and half as many numbers travel.
"""

import sys

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
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def base() -> LlamaForCausalLM:
    return LlamaForCausalLM(CONFIG)


def texts(count: int, seed: int) -> fedcomp.Data:
    """Sequences that count upwards by one; every token is also the target, which the model shifts itself."""
    first = torch.randint(0, WORDS, (count, 1), generator=torch.Generator().manual_seed(seed))
    words = (first + torch.arange(LENGTH)) % WORDS
    return fedcomp.Data({"input_ids": words, "labels": words}, words)


def main(a_frozen: bool = "--freeze-a" in sys.argv) -> None:
    def model() -> PeftModel:
        adapted = get_peft_model(base(), LORA)
        for name, parameter in adapted.named_parameters():
            if a_frozen and "lora_A" in name:
                parameter.requires_grad_(False)
        return adapted

    task = fedcomp.Task("lora", model, texts(400, seed=1), texts(50, seed=2), accuracy=None)
    run = fedcomp.simulate(
        task,
        clients=10,
        participation=0.5,
        rounds=20,
        optimizer="adamw:lr=1e-2",
        uplink="topk:density=10%",
        progress=False,
    )
    run.model().save_pretrained(f"{run.folder}/adapter")  # as peft writes them
    print(f"loss {run.metrics['loss'][0]:.2f} → {run.metrics['loss'][-1]:.2f}")
    again = PeftModel.from_pretrained(base(), f"{run.folder}/adapter")
    trained = sum(p.numel() for p in model().parameters() if p.requires_grad)
    print(f"{trained:,} of {again.num_parameters():,} parameters travel; {run.folder}/adapter")


if __name__ == "__main__":
    main()
