"""``@task.saved_worker``: a function that says which command to run as a saved worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.bases.decorator import DecoratedOperator, determine_kwargs, task_decorator_factory
from airflow.sdk.definitions._internal.types import SET_DURING_EXECUTION
from airflow.sdk.definitions.context import context_merge

from airflow_provider_savedworker.operators.saved_worker import SavedWorkerOperator

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.decorator import TaskDecorator


class SavedWorkerDecoratedOperator(DecoratedOperator, SavedWorkerOperator):
    """Calls the function in the task's own process and runs what it returns: a line for the shell, or words.

    The function is called once per try, whether the try submits a worker or goes on with one, and never on the way back
    from a deferral.
    """

    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *SavedWorkerOperator.template_fields,
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **SavedWorkerOperator.template_fields_renderers,
    }
    custom_operator_name = "@task.saved_worker"
    overwrite_rtif_after_execution = True

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            python_callable=python_callable,
            op_args=op_args,
            op_kwargs=op_kwargs,
            command=SET_DURING_EXECUTION,
            **kwargs,
        )

    def execute(self, context: Context) -> Any:
        """Ask the function for the command, render it, and go on as SavedWorkerOperator."""
        context_merge(context, self.op_kwargs)
        arguments = determine_kwargs(self.python_callable, self.op_args, context)
        command = self.python_callable(*self.op_args, **arguments)
        words = isinstance(command, (list, tuple)) and command and all(isinstance(x, str) for x in command)
        if not words and not (isinstance(command, str) and command.strip()):
            raise TypeError(
                f"@task.saved_worker runs what the function returns: a command, as a string or a list of strings, "
                f"not {command!r:.80}"
            )
        self.command = command
        self.render_template_fields(context)
        return super().execute(context)


def saved_worker_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """``@task.saved_worker``: takes the arguments of SavedWorkerOperator, without ``command``."""
    return task_decorator_factory(
        python_callable=python_callable,
        decorated_operator_class=SavedWorkerDecoratedOperator,
        **kwargs,
    )
