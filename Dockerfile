# Builds the server. It serves loopback only, so run it in the host's network:
#   docker build -t openbook .
#   docker run --network host -v openbook:/data -e OPENBOOK_MODEL=<Hugging Face id> openbook
# A model of your own: -v <directory>:/models:ro -e OPENBOOK_MODEL=/models/<directory or .gguf file>
# On x86-64 the default torch brings CUDA; for the small CPU build name an index that has it:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=<index> -t openbook .

FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008 # a compiler of Debian stable: its version is the base image's
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY proto proto
COPY indexstore indexstore
COPY worker worker
COPY server server
COPY client client
RUN python -m venv /opt/openbook \
    && /opt/openbook/bin/pip install --no-cache-dir -c constraints.txt '.[server]'

FROM python:3.12-slim-bookworm
RUN groupadd --gid 10001 openbook \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent openbook \
    && install -d -m 0700 -o 10001 -g 10001 /data
COPY --from=build /opt/openbook /opt/openbook
COPY scripts/healthcheck.py /opt/openbook/healthcheck.py
# The root file system may be read-only: everything written goes to /data, or to /tmp. /tmp may be
# memory, so the caches of models have their own place: unpacked GGUF weights and downloads.
ENV PATH=/opt/openbook/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    XDG_CACHE_HOME=/data/cache \
    HF_HOME=/data/cache/huggingface \
    OPENBOOK_DATA=/data/store
VOLUME /data
USER 10001:10001
# The start covers loading a model, and the first time its download.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "/opt/openbook/healthcheck.py"]
ENTRYPOINT ["openbook"]
CMD ["serve"]
