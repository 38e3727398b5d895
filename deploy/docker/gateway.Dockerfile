# The gateway: no torch, about 100 MB. Build from the repository's root:
#   docker build -f deploy/docker/gateway.Dockerfile -t phyai-gateway .
#   docker run --rm -p 127.0.0.1:50111:50111 -p 127.0.0.1:30000:30000 phyai-gateway \
#     --gateway 0.0.0.0:50111 --http-host 0.0.0.0 --insecure-bind --backend pi05 HOST:50063
# Inside a container loopback reaches nobody, so the addresses are opened there; the ports above stay
# on the host's loopback. For robots on a network give --token-file or --tls-cert and --tls-key.
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/phyai
ENV PATH=/opt/phyai/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY constraints.txt ./
COPY phyai-gateway phyai-gateway
RUN pip install -c constraints.txt ./phyai-gateway

FROM python:3.12-slim
RUN useradd --uid 10001 --create-home --home-dir /var/lib/phyai phyai
COPY --from=build /opt/phyai /opt/phyai
ENV PATH=/opt/phyai/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /var/lib/phyai
EXPOSE 50111 30000 8080 8000 5555
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=2)"]
ENTRYPOINT ["phyai-gateway"]
