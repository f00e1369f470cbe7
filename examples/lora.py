"""Adapt a causal language model with LoRA (Hu et al. 2022). Clients train and send only the adapters.

    pip install transformers peft
    python examples/lora.py

`adapted(freeze_a=True)` trains only B of each adapter B·A (FFA-LoRA, Sun et al. 2024). Clients send half as much.
"""

import copy
from functools import cache

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fedcomp

WORDS, LENGTH = 64, 32
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = LlamaConfig(vocab_size=WORDS, num_attention_heads=4, **SIZES)
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def texts(count: int, step: int, seed: int) -> fedcomp.Data:  # numbers that increase by `step`
    first = torch.randint(WORDS, (count, 1), generator=torch.Generator().manual_seed(seed))
    words = (first + step * torch.arange(LENGTH)) % WORDS
    return fedcomp.Data({"input_ids": words, "labels": words}, words)


@cache
def pretrained() -> LlamaForCausalLM:
    """Return a base model that continues sequences such as 5, 6, 7. In your own program, load a pretrained model here."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for seed in range(100):
        optimizer.zero_grad()
        model(**texts(32, step=1, seed=seed).inputs).loss.backward()
        optimizer.step()
    return model


def adapted(freeze_a: bool = False) -> PeftModel:
    model = get_peft_model(copy.deepcopy(pretrained()), LORA)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name or "lora_A" in name and not freeze_a)
    return model


train, test = texts(400, step=2, seed=1000), texts(50, step=2, seed=1001)
task = fedcomp.Task("lora", adapted, train, test, accuracy=None)
OPTIONS = {"clients": 10, "participation": 0.5, "rounds": 8, "local_steps": 10, "progress": False}

if __name__ == "__main__":
    run = fedcomp.simulate(task, optimizer="adamw:lr=1e-2", uplink="topk:density=10%", **OPTIONS)
    run.model().save_pretrained(folder := f"{run.folder}/adapter")  # in peft's format
    sent, loaded = adapted().num_parameters(True), PeftModel.from_pretrained(pretrained(), folder)
    print(f"loss {run.metrics['loss'][0]:.2f} → {run.metrics['loss'][-1]:.2f}; {folder}")
    print(f"{sent:,} of {loaded.num_parameters():,} parameters are sent")
