"""`save`: every rank writes its own file, all agree, one commits.

    all     snapshot: which arrays go into the file, copies of what is small        (training stands still)
    rank 0  claim the folder
    all     write and sync the data files                                           (in the background: wait=False)
    rank 0  manifest, commit

In the background the arrays are read while training goes on: every unit carries a reader until its states have been
read. The update that would overwrite them asks the reader to make way (`readers`).

An error of a save in the background is raised by its handle, or by the next save or load of the model. If nobody has
asked by the time the program ends, the error is printed and the program exits with a status that is not 0.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint.save.save_job import SaveJob
from unbounded.errors import StateError
from unbounded.held_interrupts import HeldBack
from unbounded.held_interrupts import wait as wait_for
from unbounded.optim.recognition import unwrap
from unbounded.process import OwningProcess
from unbounded.sharding.running import sharded
from unbounded.zero.parameters.parameter import ManagedParameter, ShownParameter
from unbounded.zero.parameters.tiled_parameter import TiledParameter
from unbounded.zero.setup.assembly import Sharded


class Save:
    """A running save. `wait` returns when the checkpoint is committed, or raises what went wrong on any rank."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._owner = OwningProcess()

    def wait(self) -> None:
        self._owner.check("this save in the background")
        wait_for(self._over)
        _unasked.discard(self)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def done(self) -> bool:
        return self._over.is_set()

    def is_here(self) -> bool:
        """Whether this process is the one that saves, and not a child of it."""
        return self._owner.is_here()

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        if error is not None:
            _unasked.add(self)  # even if the model, and with it this handle, is gone before anybody asks
        self._over.set()


_unasked: set[Save] = set()
_pending: weakref.WeakKeyDictionary[nn.Module, Save] = weakref.WeakKeyDictionary()


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    wait: bool = True,
    **extra: Any,
) -> Save:
    """All ranks must call this. Writes one checkpoint to `folder`. An older one there is replaced only by a whole one.

    The folder is the one that the first rank names, on a filesystem that all ranks share; what others name is not used.

    Without `optimizer`, only weights and buffers are saved. `load` returns `extra`: numbers, strings, containers and
    tensors, such as the state_dict() of a scheduler. With `wait=False` it returns once everything small is copied.
    Training may continue, and the next step waits only for what it would overwrite. Errors of such a save are raised
    by the handle's `wait`, or by the next save or load.
    """
    state = sharded(model)
    with HeldBack(), state.engine.turn():  # another thread may train
        return _save(state, folder, model, optimizer, extra, wait=wait)


def _save(
    state: Sharded,
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    *,
    wait: bool,
) -> Save:
    state.engine.refuse_inside_full_params("unbounded.save")
    state.engine.refuse_pending("unbounded.save()")
    check_optimizer(state, optimizer)
    refuse_strangers(model)
    finish_pending(model)
    state.engine.confirm("unbounded.save()" if optimizer is not None else "unbounded.save() without the optimizer")
    settle(state)
    job = SaveJob(state, model, folder, optimizer is not None, extra, copy=not wait)
    job.begin()
    handle = Save()
    if wait:
        try:
            job.finish()
        finally:
            handle._end(None)
        return handle
    # Not a daemon: a program that ends finishes its save first.
    thread = threading.Thread(target=_run_in_background, args=(job, handle), name="unbounded-save")
    try:
        thread.start()
    except RuntimeError:  # the system has no more: the other ranks and the updates wait for this save all the same
        _run_in_background(job, handle)
    _pending[model] = handle
    job.wait_for_gradients()
    return handle


def finish_pending(model: nn.Module) -> None:
    """Waits for the model's save in the background, if there is one; raises what went wrong in it."""
    handle = _pending.get(model)
    if handle is None:
        return
    try:
        handle.wait()
    finally:
        if handle.done():  # otherwise Ctrl-C has ended the wait alone
            _pending.pop(model, None)


def settle(state: Sharded) -> None:
    """Returns when no update or reduction of gradients is running."""
    for unit in state.engine.units:
        if unit.trainable:
            with state.engine.failures.noting():
                unit.gradient.order_stream()
    if state.optimizer is not None:
        state.optimizer.wait()
    else:
        state.engine.failures.meet()
    for unit in state.engine.units:
        if unit.trainable:
            unit.gradient.write_out()
    if state.engine.device.type == "cuda":
        torch.cuda.current_stream(state.engine.device).synchronize()


def check_optimizer(state: Sharded, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None and unwrap(optimizer) is not state.optimizer:
        raise StateError(
            f"the {type(optimizer).__name__} given is not the optimizer that shard returned with this model. "
            "Pass the one that it returned."
        )


def refuse_strangers(model: nn.Module) -> None:
    """Raises if parameters were added to the model after `shard`, because nothing would save them.

    Inside a forward, modules hold views instead of parameters.
    """
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, nn.Parameter):
            raise StateError(
                "a sharded model cannot be saved or exported inside its own forward, where weights are gathered. Do "
                "it after the forward has returned."
            )
        is_kept = isinstance(parameter, (ManagedParameter, ShownParameter, TiledParameter))
        if not is_kept and parameter.numel() and not parameter.is_meta:
            raise StateError(
                f"the parameter {name!r} was added to the model after `shard`, so it is neither trained nor saved. Add "
                "it before `shard`, or remove it before saving."
            )


def _run_in_background(job: SaveJob, handle: Save) -> None:
    try:
        job.finish()
    except BaseException as error:
        handle._end(error)
    else:
        handle._end(None)


class _Unflushable:
    """Takes the place of stderr in a program that must not exit with 0.

    When `atexit` handlers run, a program's status is already fixed, with one exception: Python exits with 120 if a
    standard stream cannot be flushed at the very end, after all handlers. Other calls to `flush` work as always.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys._getframe().f_back is None:  # called by the interpreter itself
            raise OSError("a save in the background failed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@atexit.register
def _tell_unasked() -> None:
    """At exit, when the threads have ended: prints an error that nobody has asked for, and changes the exit status."""
    unasked = [handle for handle in _unasked if handle.is_here()]
    for handle in unasked:
        print(f"unbounded: a save in the background failed: {handle._error}", file=sys.stderr)
    if unasked:
        sys.stderr = _Unflushable(sys.stderr)  # type: ignore[assignment]
