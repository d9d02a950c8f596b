"""Run ``transformers.Trainer`` by a plan: the same script, with its model and batches divided among
unequal devices.

    from argosy.integrations.hf import ArgosyTrainer as Trainer  # not transformers.Trainer
    trainer = Trainer(model=model, args=args, ..., plan="plan.json")

and ``torchrun --nproc-per-node N train.py``, with a process for each device of the plan. Every
process runs the script and reads the same batches, of which the plan gives it its part. Import this
module before ``TrainingArguments`` are made (``processes``). Losses, schedules, evaluations,
checkpoints and callbacks are those of one process:

    (1)  a training batch has the plan's global batch: ``per_device_train_batch_size``; a last one
         may be short
    (2)  the loss is the Trainer's: a sum over all batches that are accumulated together, divided by
         the number of items that the Trainer counts in them; of a model that is captured, and if
         the loss ignores that number, a mean over samples or over the targets that are not masked
    (3)  learning rates are those of the Trainer's own scheduler, whose optimizer has no weights;
         the optimizers of ranks follow it
    (4)  outputs that metrics and predictions need are gathered on every rank
    (5)  a checkpoint contains the model as ``from_pretrained`` reads it, and under ``argosy`` the
         state from which any plan continues

Dropout draws other masks than torch's generator would: they are a function of the seed, the step
and the sample.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.dtype import Dtype
from argosy.errors import Problem, RunError, bad_input, excluded, impossible, raise_any
from argosy.integrations.counting import ReadWatch
from argosy.integrations.divided import DividedModel, refuse_whole_calls
from argosy.integrations.predictions import Part, assembled, kept
from argosy.integrations.processes import hidden_variables, visible
from argosy.plan.file import load_plan
from argosy.plan.plan import Plan
from argosy.runtime.job.agreement import batch_digest, check_agreed
from argosy.runtime.processes.failure import in_contact_beside_others
from argosy.runtime.processes.leaving import leave_at_exit
from argosy.runtime.processes.ranks import devices_by_rank, seats_of
from argosy.runtime.processes.run_folder import checkpoints
from argosy.runtime.processes.world import device_of, join
from argosy.runtime.stages.layers import has_layers, ignores_items, without_wrapper
from argosy.runtime.state import checkpoint
from argosy.runtime.step.trainer import Trainer, parallelize

try:
    import transformers
    from accelerate.state import PartialState
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ModuleNotFoundError as missing:
    sentence = f"argosy.integrations.hf needs {missing.name}; pip install 'argosy[hf]' installs it"
    raise ModuleNotFoundError(sentence, name=missing.name) from None
if not hasattr(transformers.Trainer, "_clip_grad_norm"):
    raise RunError(
        f"argosy.integrations.hf needs transformers 5.22 or newer; found {transformers.__version__}"
    )
_VARIABLES = hidden_variables()
_FOLDER = "argosy"
"""The folder in a checkpoint that contains the state from which a plan continues."""
_ITEMS = "num_items_in_batch"
_ROWS = "argosy_rows"
"""The key in a batch whose outputs are kept, with the numbers of its rows."""
# The approximate number of elements of each tensor that ranks compare.
_SAMPLES = 64
# Methods of ``transformers.Trainer`` that a plan does not call, by what a script gives instead.
_REPLACED = {
    "compute_loss": "compute_loss_func, which every rank calls with its part of the batch",
    "create_optimizer": "optimizer_cls_and_kwargs, from which every rank makes its optimizer",
}
# Settings of ``TrainingArguments`` that would have no effect, or another one, with a plan.
_NOT_HONOURED = (
    "auto_find_batch_size",
    "bf16_full_eval",
    "fp16_full_eval",
    "neftune_noise_alpha",
    "parallelism_config",
    "predict_with_generate",
    "torch_compile",
)
# Settings of a model whose outputs contain more than its last layer returns.
_INNER_OUTPUTS = ("output_attentions", "output_hidden_states")
_NO_LOGITS = (
    "none for a model that is captured: its program computes the loss alone; eval_loss is there"
)


class ArgosyTrainer(transformers.Trainer):
    """A ``transformers.Trainer`` that trains by ``plan``, a ``Plan`` or its file."""

    model: Any
    optimizer: Any
    label_smoother: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        *positional: Any,
        plan: Plan | str | Path,
        **keywords: Any,
    ) -> None:
        self.plan = load_plan(plan) if isinstance(plan, str | Path) else plan
        self.roster = devices_by_rank(self.plan)
        self.engine: Trainer | None = None
        """This rank's part of the training, made when it is first needed."""
        self.compared = False
        """True if ranks have compared a batch since the start."""
        self.parts: list[Part] = []
        """Outputs of parts of the batch that is predicted."""
        self.ignored: set[str] = set()
        """Names of outputs that are not gathered."""
        self.saved_names: frozenset[str] = frozenset()
        """Names in the model's ``state_dict``."""
        args = args or transformers.TrainingArguments(output_dir="tmp_trainer")
        if args.world_size > 1:
            expected = "argosy.integrations.hf to be imported before TrainingArguments are made"
            raise bad_input(expected, f"arguments for {args.world_size} processes", "args")
        for name in ("fsdp", "deepspeed"):
            if getattr(args, name, None):
                raise excluded(name, "a plan, which divides the model itself")
        leave_at_exit()
        with visible(_VARIABLES):
            join(self.plan, self.roster)
        self._take_place(args)
        super().__init__(model, args, *positional, **keywords)
        self._check(keywords)

    def _take_place(self, args: Any) -> None:
        """Set up accelerate as a single process on the device of this rank that writes and logs on
        rank 0 alone."""
        device = device_of(self.roster, dist.get_rank())
        args.distributed_state.process_index = dist.get_rank()
        args.distributed_state.local_process_index = dist.get_rank()
        args.distributed_state.device = device
        assert PartialState().process_index == dist.get_rank(), "accelerate shares one state"
        # Otherwise only rank 0 would read from an IterableDataset.
        args.accelerator_config.dispatch_batches = False
        args.__dict__["_setup_devices"] = device
        args._n_gpu = min(1, args._n_gpu)

    def _check(self, keywords: dict[str, Any]) -> None:
        """Raise an ``InputError`` with all settings that make training differ from one process."""
        args, plan, problems = self.args, self.plan, []

        def refuse(path: str, found: object, expected: str) -> None:
            problems.append(Problem(path, str(found), expected))

        if args.train_batch_size != plan.global_batch:
            expected = f"{plan.global_batch}, the plan's global batch"
            refuse("per_device_train_batch_size", args.train_batch_size, expected)
        if self.optimizer is not None or self.lr_scheduler is not None:
            expected = (
                "optimizer_cls_and_kwargs, from which every rank makes the optimizer of its weights"
            )
            refuse("optimizers", "an object", expected)
        dtype = Dtype.BF16 if args.bf16 else Dtype.FP16 if args.fp16 else Dtype.FP32
        if dtype is not plan.model.dtype:
            refuse("bf16, fp16", dtype, f"{plan.model.dtype}, in which the plan computes")
        if self.compute_metrics is not None and self.is_captured:
            refuse("compute_metrics", "a function", _NO_LOGITS)
        if getattr(args, "load_best_model_at_end", False) and args.save_only_model:
            expected = "false, because the best model is read from the state of all ranks"
            refuse("save_only_model", "true with load_best_model_at_end", expected)
        several = args.gradient_accumulation_steps > 1
        if several and not (self.counts_items and self.model_accepts_loss_kwargs):
            expected = (
                "1 for a model that is captured or whose loss ignores num_items_in_batch; a larger "
                "global batch accumulates as much"
            )
            refuse("gradient_accumulation_steps", args.gradient_accumulation_steps, expected)
        for name, instead in _REPLACED.items():
            if getattr(type(self), name) is not getattr(ArgosyTrainer, name):
                refuse(name, f"a method of {type(self).__name__}", instead)
        problems += _without_effect(args, self.model)
        raise_any(problems)

    def _get_dataloader(self, *positional: Any, **keywords: Any) -> Any:
        """Return a DataLoader whose workers draw the same random numbers on every rank, namely
        those of one process."""
        state = self.args.distributed_state
        index, state.process_index = state.process_index, 0
        try:
            return super()._get_dataloader(*positional, **keywords)
        finally:
            state.process_index = index

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model in place, since ranks take their parts of it."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Divide the model, and make the optimizer that the scheduler drives (3)."""
        del model
        if self.optimizer is None:
            self._compare_values()
            kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, self.model
            )
            strange = {"params", "model", "optimizer_dict"}.intersection(options)
            if strange or not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
                raise bad_input(
                    "an optimizer that takes groups of parameters", str(self.args.optim), "optim"
                )
            if hasattr(kind, "eval"):  # such as AdamWScheduleFree
                expected = "an optimizer whose weights are the same in training and evaluation"
                raise bad_input(expected, kind.__name__, "optim")
            decayed = frozenset(self.get_decay_parameter_names(self.model))

            def groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
                pairs = list(named)
                kept = [parameter for name, parameter in pairs if name in decayed]
                others = [parameter for name, parameter in pairs if name not in decayed]
                return [
                    {"params": kept, "weight_decay": self.args.weight_decay},
                    {"params": others, "weight_decay": 0.0},
                ]

            def factory(named_parameters: Any) -> torch.optim.Optimizer:
                return kind(groups(named_parameters), **options)

            self.engine = parallelize(
                self.model,
                self._loss_of,
                factory,
                self._example(),
                self.plan,
                clip_norm=self.args.max_grad_norm or math.inf,  # the norm is logged anyway
                seed=self.args.seed,
            )
            self.optimizer = kind(groups([]), **options)
            refuse_whole_calls(self.model)
        return self.optimizer

    def _compare_values(self) -> None:
        """Raise an ``InputError`` if ranks have built models with different values, for example
        without ``set_seed``."""
        state = self.model.state_dict()
        self.saved_names = frozenset(state)
        samples = {
            name: value.detach().flatten()[:: max(1, value.numel() // _SAMPLES)].double().cpu()
            for name, value in state.items()
            if not value.is_meta
        }
        facts = {"the model's values (call set_seed before it is built)": batch_digest(samples)}
        check_agreed(facts, self.roster, device_of(self.roster, dist.get_rank()))

    @property
    def is_captured(self) -> bool:
        """Return whether stages are made of operations, with sizes that a batch gives, instead of
        layers."""
        shared = any(replica.width > 1 for stage in self.plan.stages for replica in stage.replicas)
        return shared or self.plan.cut is not None or not has_layers(self.model)

    @property
    def counts_items(self) -> bool:
        """Return whether the loss is a sum divided by the number of items that it is given."""
        own_loss = self.compute_loss_func is not None or self.label_smoother is not None
        return not self.is_captured and (own_loss or not ignores_items(self.model))

    def _example(self) -> Any:
        """Return a batch to capture a model with; random numbers drawn for it are drawn again
        later."""
        if not self.is_captured:
            return {"rows": torch.zeros(self.plan.global_batch)}
        with torch.random.fork_rng(devices=[]):
            return dict(next(iter(self.get_train_dataloader())))

    def _loss_of(self, model: Any, batch: dict[str, Any]) -> Any:
        """Return the loss of the Trainer's ``compute_loss``: a mean over a part of the batch, or
        the part's share of the whole loss if it is divided by the number of items in the whole
        batch."""
        inputs = dict(batch)
        rows = inputs.pop(_ROWS, None)
        if rows is not None and not self._has_labels(inputs):
            self._keep(rows, model(**inputs), first=0)
            return torch.zeros((), device=rows.device), None
        items = inputs.pop(_ITEMS, None)
        if items is None:
            loss, outputs = self._loss_and_outputs(model, inputs, {})
            is_share = False
        else:
            device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
            count = torch.tensor(float(items), device=device)
            with ReadWatch(count) as watch:
                loss, outputs = self._loss_and_outputs(model, inputs, {_ITEMS: count})
            is_share = watch.is_read
            if not is_share and self.args.gradient_accumulation_steps > 1:
                expected = "1, because the loss ignores num_items_in_batch"
                steps = self.args.gradient_accumulation_steps
                raise bad_input(expected, steps, "gradient_accumulation_steps")
        if rows is not None:
            self._keep(rows, outputs, first=1)
        return (loss, None) if is_share else loss

    def _loss_and_outputs(
        self, model: Any, inputs: dict[str, Any], counted: dict[str, Tensor]
    ) -> tuple[Any, Any]:
        if self.compute_loss_func is None and self.label_smoother is None:
            outputs = model(**inputs, **counted)
            return outputs["loss"] if isinstance(outputs, dict) else outputs[0], outputs
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            return self.compute_loss_func(outputs, labels, **{_ITEMS: None, **counted}), outputs
        kind = type(without_wrapper(self.model)).__name__
        shifts = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return self.label_smoother(outputs, labels, shift_labels=shifts, **counted), outputs

    def _has_labels(self, inputs: dict[str, Any]) -> bool:
        return bool(self.label_names) and all(
            inputs.get(name) is not None for name in self.label_names
        )

    def _keep(self, rows: Tensor, outputs: Any, *, first: int) -> None:
        """Keep the outputs of a part of the batch; of a tuple, those from ``first`` on."""
        if isinstance(outputs, dict):
            values = tuple(value for name, value in outputs.items() if name not in self.ignored)
        else:
            values = tuple(outputs[first:]) if isinstance(outputs, tuple) else (outputs,)
        self.parts.append((rows, kept(values)))

    def _counted(self, inputs: dict[str, Any], items: Any) -> dict[str, Any]:
        """Add the number of items in the whole batch to a batch, unless the model ignores it."""
        known = {} if items is None or not self.counts_items else {_ITEMS: int(items)}
        return {**inputs, **known}

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """Wrap the model, so that accelerate does not change it."""
        del training, dataloader
        return model if isinstance(model, DividedModel) else DividedModel(model)

    def _divided(self) -> Trainer:
        if self.engine is None:
            self.create_optimizer()
        assert self.engine is not None
        return self.engine

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Train on a batch by the plan, and update if it is the last one that is accumulated."""
        engine = self._divided()
        batch = self._counted(self._prepare_inputs(inputs), num_items_in_batch)
        self._compare(batch)
        model.train()
        if not self.accelerator.sync_gradients:
            engine.accumulate(batch)
            return torch.zeros((), device=self.args.device)
        if engine.optimizer is not None:
            for own, shown in zip(
                engine.optimizer.param_groups, self.optimizer.param_groups, strict=True
            ):
                own |= {name: value for name, value in shown.items() if name != "params"}
        return torch.tensor(engine.step(batch), device=self.args.device)

    def _compare(self, batch: dict[str, Any]) -> None:
        """Raise an ``InputError`` if ranks have read different batches; compare only the first."""
        if not self.compared:
            self.compared = True
            check_agreed(
                {"the first batch": batch_digest(batch)}, self.roster, self._divided().device
            )

    def _clip_grad_norm(self, model: Any) -> Any:
        """Return the gradient norm of the last step, whose update has already been clipped."""
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        del model
        return grad_norm if grad_norm is not None else self._divided().metrics.gradient_norm

    def evaluation_loop(self, *positional: Any, **keywords: Any) -> Any:
        """Evaluate as ``Seq2SeqTrainer`` does if the script has its arguments: a last short batch
        weighs as much as a whole one in ``eval_loss``."""
        if isinstance(self.args, transformers.Seq2SeqTrainingArguments):
            self.gather_function = self.accelerator.gather
        return super().evaluation_loop(*positional, **keywords)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Any = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss of a batch and, unless only that is requested, its outputs and labels on
        every rank."""
        del model
        inputs = self._prepare_inputs(inputs)
        engine, has_labels = self._divided(), self._has_labels(inputs)
        items = self._get_num_items_in_batch([inputs], self.args.device) if has_labels else None
        batch = self._counted(inputs, items)
        if prediction_loss_only:
            return self._on_device(engine.evaluate(batch)) if has_labels else None, None, None
        if self.is_captured:
            reason = "the program of a captured model computes only the loss"
            raise impossible("predict", reason, "evaluate, which returns eval_loss")
        if ignore_keys is None:
            ignore_keys = getattr(
                getattr(self.model, "config", None), "keys_to_ignore_at_inference", []
            )
        self.ignored = {*ignore_keys, "loss"}
        count = len(next(value for value in inputs.values() if isinstance(value, Tensor)))
        self.parts.clear()
        loss = engine.evaluate({**batch, _ROWS: torch.arange(count)})
        sources = [seat.rank for seat in seats_of(self.plan, self.roster)[-1]]
        outputs = assembled(self.parts, count, sources, engine.device)
        labels = tuple(inputs[name] for name in self.label_names) if has_labels else None
        return self._on_device(loss) if has_labels else None, _single(outputs), _single(labels)

    def _on_device(self, loss: float) -> Tensor:
        return torch.tensor(loss, device=self.args.device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as ``from_pretrained`` reads it (5). Every rank calls this."""
        folder = Path(output_dir or self.args.output_dir or ".")
        with in_contact_beside_others("while the model was saved, which all processes must do"):
            saved = self._divided().save(folder / _FOLDER)
        if self.args.should_save:
            values = {
                name: value
                for name, value in checkpoint.read_state_dict(saved).items()
                if name in self.saved_names
            }
            self._save(str(folder), state_dict=values)
            if not _internal_call or self.args.save_only_model:
                shutil.rmtree(folder / _FOLDER)
        dist.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the generators' state on one rank, since all ranks draw the same numbers."""
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Leave weights to the plan's own checkpoint. Without one there may be weights alone, which
        are read before the model is divided."""
        folder = Path(resume_from_checkpoint)
        if checkpoints(folder / _FOLDER):
            return
        reason = None
        if (folder / "optimizer.pt").exists():
            reason = "its optimizer state is that of one process"
        elif self.engine is not None:
            reason = "it has weights alone, and the model is divided already"
        if reason is not None:
            remedy = f'from_pretrained("{folder}") with a new trainer, which begins at step 0'
            raise impossible(f"resume {folder} by a plan", reason, remedy)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        saved = checkpoints(Path(checkpoint) / _FOLDER) if checkpoint is not None else []
        if saved:
            self._divided().load(saved[-1])

    def _load_best_model(self) -> None:
        saved = checkpoints(Path(self.state.best_model_checkpoint or "") / _FOLDER)
        if not saved:
            expected = "a checkpoint that was written with save_only_model=False"
            raise bad_input(
                expected, str(self.state.best_model_checkpoint), "load_best_model_at_end"
            )
        checkpoint.load_weights(self._divided(), saved[-1])


def _without_effect(args: Any, model: Any) -> Iterator[Problem]:
    """Yield the settings of a script and of its model that a plan would ignore."""
    for name in _NOT_HONOURED:
        if value := getattr(args, name, None):
            yield Problem(name, str(value).lower(), "no such setting with a plan")
    for name in _INNER_OUTPUTS:
        if getattr(getattr(model, "config", None), name, False):
            yield Problem(f"model.config.{name}", "true", "false; a plan gathers logits alone")


def _single(values: tuple[Any, ...] | None) -> Any:
    """Return a single value by itself instead of a tuple, as the Trainer expects."""
    return values[0] if values is not None and len(values) == 1 else values
