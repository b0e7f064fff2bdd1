# An image for training on NVIDIA GPUs, or on a CPU. tests/test_deployment.py checks this file; CI does not build it.
#   docker build -t plumbob .
#   docker run --gpus all --ipc=host -v "$PWD/runs:/app/runs" plumbob train lookup
# With vLLM or DeepSpeed: docker build -t plumbob --build-arg EXTRAS="--extra vllm" .
FROM ghcr.io/astral-sh/uv:0.13-python3.11-bookworm-slim

# Triton needs a C compiler when it compiles layers on a GPU; environments may be installed from git.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev git && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml uv.lock .python-version ./
COPY packages packages
COPY environments environments
COPY trainer trainer
COPY configs configs
COPY scripts scripts

# Otherwise each container would compile most of 8,000 Python files at its start.
ENV UV_COMPILE_BYTECODE=1
ARG EXTRAS=""
RUN uv sync --locked --no-dev ${EXTRAS}
ENV PATH="/app/.venv/bin:$PATH"

CMD ["train", "--help"]
