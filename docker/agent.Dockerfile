# The agent's image, for AWS Batch and other fleets whose instances are containers; and where other images take its bundle from.
#
#   docker build -f docker/agent.Dockerfile -t savedworker-agent .
#
# In an image of yours:   COPY --from=savedworker-agent /opt/savedworker /opt/savedworker
# As an archive for EC2:  docker build -f docker/agent.Dockerfile --target archive --output . .     (savedworker-bundle.tar.gz)
#
# CRIU and runc: trixie's own runc is too old (no time namespaces), so scripts/install-runtime brings both from Debian's next suite, checked
# with Debian's keyring, into a directory of their own. Where a newer suite has become stable, give --build-arg SUITE=….
# The container has to be privileged, or have SYS_ADMIN, NET_ADMIN, SYS_PTRACE and more (docs/aws-instance.md); its user is root.
ARG DEBIAN=debian:trixie-slim

FROM ${DEBIAN} AS build
ARG SUITE=forky
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update -qq && \
    apt-get install -y -qq --no-install-recommends \
        ca-certificates debian-archive-keyring gcc gzip iproute2 libc6-dev mount nftables python3 python3-pip skopeo tar umoci util-linux
COPY LICENSE constraints.txt pyproject.toml /src/
COPY scripts /src/scripts
COPY savedworker /src/savedworker
RUN SAVEDWORKER_SUITE=${SUITE} /src/scripts/make-bundle /bundle --tar /savedworker-bundle.tar.gz

FROM scratch AS archive
COPY --from=build /savedworker-bundle.tar.gz /

FROM ${DEBIAN}
# What the bundle has not is what a worker with image "host" may want of a Debian: nothing more is needed by the agent.
RUN apt-get update -qq && \
    apt-get install -y -qq --no-install-recommends ca-certificates python3 && \
    rm -rf /var/lib/apt/lists/*
COPY --from=build /bundle /opt/savedworker
CMD ["/opt/savedworker/bin/savedworker", "doctor"]
