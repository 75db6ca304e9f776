# One image for engine, api and serve. CPU build of torch; everything else as requirements.lock names it.
FROM python:3.11-slim AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/midsentence
WORKDIR /src
# torch first: the build on PyPI brings CUDA along. Name PyTorch's index of CPU builds to save gigabytes; the lock then finds it there.
ARG TORCH_INDEX_URL
RUN /opt/midsentence/bin/pip install ${TORCH_INDEX_URL:+--index-url $TORCH_INDEX_URL} --no-deps torch==2.13.0
COPY requirements.lock ./
RUN /opt/midsentence/bin/pip install --no-deps -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY engine ./engine
COPY storage ./storage
COPY recovery ./recovery
COPY service ./service
COPY chaos ./chaos
RUN /opt/midsentence/bin/pip install --no-deps .

FROM python:3.11-slim

LABEL org.opencontainers.image.title="midsentence" \
      org.opencontainers.image.licenses="Apache-2.0"
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
ENTRYPOINT ["midsentence"]
CMD ["serve", "--host", "0.0.0.0"]
