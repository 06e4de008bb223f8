# ithaka with FlashAttention 4. torch's wheels bring CUDA; the host needs the NVIDIA driver and its container toolkit.
#   docker build -t ithaka .
#   docker run --gpus all --ipc host -v $PWD:/work ithaka ithaka doctor
FROM python:3.12-slim

RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev numactl \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE /ithaka/
COPY src /ithaka/src
COPY examples /ithaka/examples
# The versions that ran on an H200.
RUN pip install --no-cache-dir '/ithaka[gpu,hf]' torch==2.11.0 transformers==5.17.0 trl==1.16.0 \
    peft==0.21.2 accelerate==1.15.0
WORKDIR /work
CMD ["ithaka", "doctor"]
