# A server in a container. For NVIDIA GPUs, whose driver knows CUDA 13:
#     docker build -t jspec . && docker run --gpus all -p 8000:8000 -e JSPEC_API_KEY=... jspec
# For CPUs:
#     docker build --build-arg EXTRAS=serve -t jspec:cpu . && docker run -p 8000:8000 -e JSPEC_API_KEY=... jspec:cpu
# CUDA's libraries come with jax, so both have the same base.
FROM python:3.12-slim

ARG EXTRAS=cuda13,serve

COPY pyproject.toml setup.py README.md LICENSE /src/
COPY jspec /src/jspec
COPY convert /src/convert
COPY pallas_kernels /src/pallas_kernels
RUN pip install --no-cache-dir "/src[${EXTRAS}]" && rm -r /src

RUN useradd --create-home --uid 1000 jspec
USER 1000
# Weights and compiled programs: mount a volume here, or they are loaded and compiled at every start.
ENV HF_HOME=/home/jspec/.cache/hub
VOLUME /home/jspec/.cache

EXPOSE 8000
HEALTHCHECK --start-period=15m CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["jspec"]
CMD ["serve", "--host", "0.0.0.0"]
