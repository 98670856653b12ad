# A server with the demo checkpoint, on a CPU:
#
#   docker build -t selfspec .
#   docker run --rm -p 127.0.0.1:8000:8000 selfspec
#
# Another checkpoint: docker run ... -v /path/to/checkpoint:/model:ro selfspec /model

FROM python:3.12-slim AS build
# PyTorch's own index of builds for CPUs; for a GPU take another, such as .../whl/cu130.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The compiler builds the CPU kernels; it stays behind in this stage. Any version of it will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/selfspec
ENV PATH=/opt/selfspec/bin:$PATH
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH"
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY layerskip_models layerskip_models
COPY policies policies
COPY selfspec selfspec
COPY bench bench
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[serve]"

FROM python:3.12-slim
RUN useradd --uid 1000 --create-home selfspec
COPY --from=build /opt/selfspec /opt/selfspec
ENV PATH=/opt/selfspec/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/selfspec
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=2m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["selfspec", "serve", "--host", "0.0.0.0", "--port", "8000"]
