# Model server on CPUs. Build from the repository's root:
#   docker build -f deploy/docker/server.Dockerfile -t phyai-server .
# PyPI's torch for Linux brings CUDA libraries along; for a small image name PyTorch's CPU index:
#   docker build --build-arg TORCH_INDEX=<URL of that index> -f deploy/docker/server.Dockerfile -t phyai-server .
# Run, with a serve file and a checkpoint of your own:
#   docker run --rm -p 127.0.0.1:50063:50063 -p 127.0.0.1:50064:50064 \
#     -v "$PWD/serve.yaml:/etc/phyai/serve.yaml:ro" -v "$PWD/checkpoint:/models/pi05:ro" phyai-server
FROM python:3.12-slim AS build
ARG TORCH_INDEX=""
ARG MODELS="phyai-models-pi[sentencepiece]"
WORKDIR /src
RUN python -m venv /opt/phyai
ENV PATH=/opt/phyai/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY constraints.txt ./
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$(sed -n 's/^torch==//p' constraints.txt)"
COPY phyai-core phyai-core
COPY phyai-gateway phyai-gateway
COPY phyai-models-pi phyai-models-pi
COPY phyai-models-groot phyai-models-groot
COPY phyai-models-minicpm phyai-models-minicpm
COPY phyai-models-cosmos phyai-models-cosmos
# hadolint ignore=DL3013,SC2046
RUN pip install -c constraints.txt ./phyai-core ./phyai-gateway $(printf './%s ' $MODELS)

FROM python:3.12-slim
# The C++ kernels are compiled once for the CPU they run on; without a compiler torch's own are used.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /var/lib/phyai phyai
COPY --from=build /opt/phyai /opt/phyai
# Built presets, compiled kernels and downloaded checkpoints; mount a volume to keep them.
ENV PATH=/opt/phyai/bin:$PATH PYTHONUNBUFFERED=1 PHYAI_CACHE=/cache/phyai HF_HOME=/cache/huggingface
RUN mkdir -p /cache /etc/phyai && chown phyai /cache
USER 10001
WORKDIR /var/lib/phyai
VOLUME /cache
EXPOSE 50063 50064
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=900s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:50064/health/ready', timeout=2)"]
ENTRYPOINT ["phyai", "serve"]
CMD ["/etc/phyai/serve.yaml"]
