"""nano-vllm, unmodified, over pagetile: its own example on a tiny Qwen3, checked against Transformers.

    git clone https://github.com/GeeeekExplorer/nano-vllm
    python examples/nano_vllm.py --nano-vllm nano-vllm                       # a tiny random Qwen3, made on the spot
    python examples/nano_vllm.py --nano-vllm nano-vllm --model Qwen3-0.6B    # or one that is on disk
    python -O examples/nano_vllm.py --nano-vllm nano-vllm --block-size 16    # blocks that FlashAttention 2 refuses

nano-vllm asks for flash-attn, which has no build for many machines and takes blocks of 256 only. The two lines that
change this are the import and the call of ``install``. ``-O`` is for nano-vllm's own assertion that blocks are
multiples of 256; nothing below it needs that. It wants a CUDA device, and the packages torch, triton, transformers and
xxhash.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import pagetile.compat.flash_attn

PROMPTS = ["introduce yourself", "list all prime numbers within 100"]


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--nano-vllm", type=Path, required=True, help="a checkout of nano-vllm")
    parse.add_argument("--model", type=Path, default=None, help="a folder with a Qwen3; default: a tiny random one")
    parse.add_argument("--block-size", type=int, default=256)
    parse.add_argument("--tokens", type=int, default=48)
    parse.add_argument("--graphs", action="store_true", help="let nano-vllm capture CUDA graphs for its decode steps")
    asked = parse.parse_args()

    pagetile.compat.flash_attn.install()
    sys.path.insert(0, str(asked.nano_vllm))
    from nanovllm import LLM, SamplingParams
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        path = str(asked.model or tiny_qwen3(Path(folder)))
        tokenizer = AutoTokenizer.from_pretrained(path)
        chats = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
            for p in PROMPTS
        ]
        llm = LLM(
            path,
            enforce_eager=not asked.graphs,
            kvcache_block_size=asked.block_size,
            gpu_memory_utilization=0.5,
            max_model_len=1024,
        )
        # Its sampler has no greedy choice; at this temperature it makes one.
        params = SamplingParams(temperature=1e-6, max_tokens=asked.tokens, ignore_eos=True)
        outputs = llm.generate(chats, params)
        # The second time a prompt finds its full blocks in nano-vllm's prefix cache and attends through the table.
        outputs += llm.generate(chats, params)
        chats += chats
        verdicts = judge(path, [tokenizer.encode(chat) for chat in chats], [out["token_ids"] for out in outputs])
    for prompt, output, (first, behind) in zip(chats, outputs, verdicts, strict=True):
        print(f"\nPrompt: {prompt!r}\nCompletion: {output['text']!r}")
        print(f"{first} of {asked.tokens} tokens are Transformers' first choice; others behind by {behind:.3f}")


def judge(path: str, prompts: list[list[int]], answers: list[list[int]]) -> list[tuple[int, float]]:
    """Transformers' own attention over each request and its answer: how many tokens are its first choice given those
    before, and by how much the worst of the others is behind (a bfloat16 logit of 8 has steps of 0.06)."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation="eager").to(device).eval()
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer], device=device)).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer, device=device).unsqueeze(1)).squeeze(1)
        behind = logits.amax(dim=1) - chosen
        found.append((int((behind == 0).sum()), float(behind.max())))
    return found


def tiny_qwen3(folder: Path) -> Path:
    """A random bfloat16 Qwen3 of two layers (4/2 heads of 64) whose tokens are bytes, with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    fast.save_pretrained(folder)

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=fast.eos_token_id,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
