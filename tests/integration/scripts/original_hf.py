"""
A training with the Trainer of transformers as people write it for the original DLRover: nothing in here knows of this implementation. The only
addition is `--crash_at`.
"""

import argparse
import os
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments  # noqa: E402

from dlrover.trainer.torch.flash_checkpoint.hf_trainer import FlashCkptTrainer  # noqa: E402


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save_dir", type=str, required=True)
    parser.add_argument("--max_iters", type=int, default=12)
    parser.add_argument("--save_storage_interval", type=int, default=5)
    parser.add_argument("--crash_at", type=int, default=-1)
    return parser.parse_args()


class Crash(TrainerCallback):
    def __init__(self, crash_at):
        self.crash_at = crash_at

    def on_step_end(self, args, state, control, **kwargs):
        is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if state.global_step == self.crash_at and is_first_life and dist.get_rank() == 1:
            os._exit(1)


def main():
    args = get_args()
    torch.manual_seed(1337)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    words = torch.randint(64, (100, 8), generator=torch.Generator().manual_seed(1))
    training_args = TrainingArguments(
        output_dir=args.save_dir,
        max_steps=args.max_iters,
        save_strategy="steps",
        save_steps=args.save_storage_interval,
        per_device_train_batch_size=2,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = FlashCkptTrainer(
        model=model,
        args=training_args,
        train_dataset=[{"input_ids": each, "labels": each} for each in words],
        callbacks=[Crash(args.crash_at)],
    )
    last_ckpt_path = trainer.get_last_checkpoint()
    if dist.get_rank() == 0:
        iter_num = int(last_ckpt_path.rsplit("-", 1)[1]) if last_ckpt_path else 0
        print(f"start from iteration {iter_num}", flush=True)
    trainer.train(resume_from_checkpoint=last_ckpt_path)
    if dist.get_rank() == 0:
        print(f"loss {trainer.evaluate(trainer.train_dataset)['eval_loss']:.9f}", flush=True)
    else:
        trainer.evaluate(trainer.train_dataset)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
