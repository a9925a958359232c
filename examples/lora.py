"""LoRA: low-rank updates of frozen weights (Hu et al. 2021, arXiv:2106.09685).

    python examples/lora.py --model Qwen3-0.6B --quantise int4

is `train_lm.py --lora 16`, here beside weights of 4 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).
"""

import sys

from train_lm import main

if __name__ == "__main__":
    sys.exit(main(["--lora", "16", *sys.argv[1:]]))
