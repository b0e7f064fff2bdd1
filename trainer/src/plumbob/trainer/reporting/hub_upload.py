"""`--push-to-hub`: upload the final model to the Hugging Face hub. If that fails, the run directory still has it."""

from __future__ import annotations

from pathlib import Path

from plumbob.console import UserError, first_line
from plumbob.trainer.config.train import TrainConfig


def check_hub_access(config: TrainConfig, *, endpoint: str | None = None) -> None:
    """Raise UserError if the upload could not work: no token, a token without write access, or an invalid name."""
    name = config.hub_model_id or config.run_name  # None: the run directory's name will be used, which is not known yet
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        if name is not None:
            validate_repo_id(name)
        who = HfApi(endpoint=endpoint).whoami()
    except HFValidationError as error:
        raise UserError(f"--hub-model-id {name!r} is not a valid model name on the hub: {_reason(error)}") from None
    except Exception as error:  # the hub's client raises its HTTP library's errors, which change with its version
        raise UserError(f"--push-to-hub cannot work: {_reason(error)}") from None
    role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise UserError(
            "--push-to-hub cannot work: the hub token has no write access; make one that has, and run `hf auth login`"
        )
    owner, slash, _ = (name or "").partition("/")
    owners = [who["name"], *(org["name"] for org in who.get("orgs") or [])]
    if slash and owner not in owners:
        raise UserError(
            f"--hub-model-id {name}: the hub token of {who['name']} can upload to {', '.join(owners)}, not to {owner}"
        )


def push_to_hub(folder: Path, name: str, *, endpoint: str | None = None) -> str:
    """Upload `folder` as the model `name`, private if it is new; returns its address.

    Raises UserError, whose message says how to try again.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    try:
        repository = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Trained with plumbob")
    except Exception as error:  # the hub's client raises its HTTP library's errors, which change with its version
        raise UserError(f"{_reason(error)}; to try again: `hf upload {name} {folder}`") from None
    return str(repository)


def _reason(error: Exception) -> str:
    """Why the hub's client failed, and what to do about it, in one line."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    if isinstance(error, LocalTokenNotFoundError):
        return "there is no hub token; run `hf auth login`, or set HF_TOKEN"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to upload"
    if isinstance(error, HfHubHTTPError) and getattr(error.response, "status_code", None) == 401:
        return "the hub rejects the token; run `hf auth login`, or set HF_TOKEN"
    return first_line(error).rstrip(" .")
