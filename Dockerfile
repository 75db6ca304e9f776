# One image for engine, api and serve, of what requirements.lock names: but for torch, no file is installed whose hash it does not list.
# Verified by its parts in tests/deploy/test_dockerfile.py. Not built: there is no Docker engine where the tests run.
FROM python:3.11-slim AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/midsentence
WORKDIR /src
# The torch on PyPI brings CUDA along. Name PyTorch's index of CPU builds to save gigabytes: its 2.13.0+cpu goes before 2.13.0.
ARG TORCH_INDEX_URL
# Anything: OpenTelemetry comes along, for traces.
ARG TRACES
COPY requirements.lock requirements-otel.lock ./
RUN /opt/midsentence/bin/pip install ${TORCH_INDEX_URL:+--extra-index-url $TORCH_INDEX_URL} "$(grep -o '^torch==[0-9.]*' requirements.lock)" \
    && /opt/midsentence/bin/pip install --no-deps --require-hashes -r requirements.lock ${TRACES:+-r requirements-otel.lock}
COPY pyproject.toml README.md LICENSE ./
COPY engine ./engine
COPY storage ./storage
COPY recovery ./recovery
COPY service ./service
COPY chaos ./chaos
RUN /opt/midsentence/bin/pip install --no-deps --no-build-isolation .

FROM python:3.11-slim

ARG VERSION=0.1.0
ARG REVISION
LABEL org.opencontainers.image.title="midsentence" \
      org.opencontainers.image.description="The server that finishes its sentence: long LLM generation jobs that survive kill -9" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.revision=$REVISION
# Volumes made from these directories get their owner.
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin midsentence \
    && install -d -m 0700 -o midsentence -g midsentence /var/lib/midsentence /var/cache/midsentence
COPY --from=build /opt/midsentence /opt/midsentence
ENV PATH=/opt/midsentence/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/var/cache/midsentence \
    XDG_CACHE_HOME=/var/cache/midsentence \
    HF_HOME=/var/cache/midsentence/huggingface \
    MIDSENTENCE_DATA_DIR=/var/lib/midsentence
USER midsentence
WORKDIR /var/lib/midsentence
VOLUME ["/var/lib/midsentence", "/var/cache/midsentence"]
EXPOSE 8710 8711
STOPSIGNAL SIGTERM
# Alive is what answers: serve and api on the first port, an engine of its own on the second. Not ready is no reason to be killed.
HEALTHCHECK --interval=10s --timeout=10s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import contextlib, sys, urllib.request as u\nfor port in (8710, 8711):\n with contextlib.suppress(OSError):\n  u.urlopen(f'http://127.0.0.1:{port}/livez', timeout=3)\n  sys.exit(0)\nsys.exit(1)"]
ENTRYPOINT ["midsentence"]
# Refused without MIDSENTENCE_API_KEYS_FILE (or MIDSENTENCE_ALLOW_ANONYMOUS=true where only this machine reaches the port).
CMD ["serve", "--host", "0.0.0.0"]
