# Model server on NVIDIA GPUs. NOT TESTED: no GPU was at hand when this was written; it differs from
# server.Dockerfile only in torch's CUDA build and needs the NVIDIA container toolkit on the host.
#   docker build -f deploy/docker/server-cuda.Dockerfile -t phyai-server:cuda .
#   docker run --rm --gpus 1 -p 127.0.0.1:50063:50063 -p 127.0.0.1:50064:50064 \
#     -v "$PWD/serve.yaml:/etc/phyai/serve.yaml:ro" -v "$PWD/checkpoint:/models/pi05:ro" phyai-server:cuda
FROM python:3.12-slim AS build
ARG MODELS="phyai-models-pi[sentencepiece]"
WORKDIR /src
RUN python -m venv /opt/phyai
ENV PATH=/opt/phyai/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY constraints.txt ./
# The Linux build on PyPI holds CUDA; triton comes with it.
RUN pip install "torch==$(sed -n 's/^torch==//p' constraints.txt)"
COPY phyai-core phyai-core
COPY phyai-gateway phyai-gateway
COPY phyai-models-pi phyai-models-pi
COPY phyai-models-groot phyai-models-groot
COPY phyai-models-minicpm phyai-models-minicpm
COPY phyai-models-cosmos phyai-models-cosmos
# hadolint ignore=DL3013,SC2046
RUN pip install ./phyai-core ./phyai-gateway $(printf './%s ' $MODELS)

FROM python:3.12-slim
# Triton compiles a small launcher with the C compiler on first use.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /var/lib/phyai phyai
COPY --from=build /opt/phyai /opt/phyai
ENV PATH=/opt/phyai/bin:$PATH PYTHONUNBUFFERED=1 PHYAI_CACHE=/cache/phyai HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
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
