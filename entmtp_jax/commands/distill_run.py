"""The distill command's work: prompts in, shards of answers out."""

import argparse
import hashlib
import json

import jax
from tqdm import tqdm

from entmtp_jax.assemble import Model, load_draft, load_model, make_policy
from entmtp_jax.bank import bank_of
from entmtp_jax.cli import notify
from entmtp_jax.decode import ModelParams
from entmtp_jax.errors import UserError
from entmtp_jax.hub import cache_folder, enable_compile_cache
from entmtp_jax.prompts import Prompt, read_prompts
from entmtp_jax.text import Text
from entmtp_jax.topology import autoregressive
from entmtp_jax.training.distill import DistillConfig, Question, Writer, distill


def ask(args: argparse.Namespace, text: Text, prompts: list[Prompt]) -> list[Question]:
    """The prompts as token ids, without those that are too long.

    Raises:
      UserError: none is left.
    """
    if args.no_chat:
        questions = [Question(prompt.id, text.encode(prompt.prompt)) for prompt in prompts]
    else:
        questions = [Question(prompt.id, text.chat(prompt.prompt, args.system)) for prompt in prompts]
    kept = [question for question in questions if len(question.tokens) <= args.max_prompt_tokens]
    if not kept:
        raise UserError(f"{args.prompts}: all prompts are longer than {args.max_prompt_tokens} tokens; allow more")
    return kept


def default_policy() -> str:
    """The policy unless told: a batch's own rows already fill a CPU, so drafts would only cost there."""
    return "ar" if jax.default_backend() == "cpu" else "entropy"


def load_writer(args: argparse.Namespace, model: Model) -> Writer:
    """The model with the heads, the bank and the policy that the flags ask for."""
    name = args.policy or default_policy()
    # Plain decoding needs nothing that drafts, and a bank of nothing else compiles faster.
    wanted = ("lookup", bank_of(autoregressive())) if name == "ar" else (args.heads, args.bank)
    draft = load_draft(model, *wanted, notify=notify)
    policy = make_policy(name, draft.bank, dtype=model.dtype, batch=args.batch_size, notify=notify)
    return Writer(model.backbone, draft.head, ModelParams(model.params, draft.params), draft.bank, policy)


def run(args: argparse.Namespace) -> int:
    """Answers what is not answered yet and prints how much that was."""
    prompts = read_prompts(args.prompts)
    cache = cache_folder(args.cache_dir)
    enable_compile_cache(cache)
    model = load_model(args.model, dtype="float32", cache=cache, notify=notify)
    questions = ask(args, model.text, prompts)
    writer = load_writer(args, model)
    settings = {
        "fingerprint": model.fingerprint,
        "template": None if args.no_chat else hashlib.sha256((model.text.template or "").encode()).hexdigest()[:16],
        "system": args.system,
    }
    with tqdm(desc="answers", unit="prompt", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if bar.disable:
                print(json.dumps({"answered": done, "of": total}), flush=True)

        config = DistillConfig(model.config.eos_ids, max_new_tokens=args.max_new_tokens, batch=args.batch_size)
        new = distill(writer, questions, args.out, config, settings=settings, progress=progress)
    print(json.dumps({"answered_now": new, "answered": len(questions), "too_long": len(prompts) - len(questions)}))
    return 0
