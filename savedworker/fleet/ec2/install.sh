# Installs the agent's bundle where the image has none. Part of the user data (user_data.py), which sets the variables in capitals.
# S3 wants the digest of the (empty) body as a header, which curl before 8 does not send. Needs curl 7.88 or later (for s3://: older ones do not sign the session token), tar and sha256sum. Credentials are the instance's role's, and go through no argument.

if [ ! -x "$AGENT" ]; then
    [ -n "$BUNDLE" ] || fail "there is no $AGENT in this image, and the fleet has no bundle"
    archive=/var/tmp/savedworker-bundle
    case $BUNDLE in
    s3://*)
        metadata=http://169.254.169.254/latest
        token=$(curl -sSf --retry 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' "$metadata/api/token") ||
            fail "the metadata service gives no token"
        role=$(curl -sSf --retry 5 -H "X-aws-ec2-metadata-token: $token" "$metadata/meta-data/iam/security-credentials/") ||
            fail "this instance has no role: set instance_profile of the fleet"
        answer=$(curl -sSf --retry 5 -H "X-aws-ec2-metadata-token: $token" \
            "$metadata/meta-data/iam/security-credentials/${role%%[[:space:]]*}" | tr -d '\n')
        member() { printf '%s' "$answer" | sed -n "s/.*\"$1\" *: *\"\([^\"]*\)\".*/\1/p"; }
        path=${BUNDLE#s3://}
        endpoint=${AWS_ENDPOINT_URL_S3:-${AWS_ENDPOINT_URL:-}}
        if [ -n "$endpoint" ]; then
            from=${endpoint%/}/$path
        else
            from=https://${path%%/*}.s3.$AWS_REGION.amazonaws.com/${path#*/}
        fi
        nothing=e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855
        printf 'user = "%s:%s"\nheader = "x-amz-security-token: %s"\n' \
            "$(member AccessKeyId)" "$(member SecretAccessKey)" "$(member Token)" |
            curl -sSf --retry 5 --max-time 600 --config - -H "x-amz-content-sha256: $nothing" --aws-sigv4 "aws:amz:$AWS_REGION:s3" -o "$archive" "$from" ||
            fail "$BUNDLE cannot be fetched"
        ;;
    *)
        curl -sSfL --retry 5 --max-time 600 -o "$archive" "$BUNDLE" || fail "$BUNDLE cannot be fetched"
        ;;
    esac
    if [ -n "$BUNDLE_SHA256" ]; then
        printf '%s  %s\n' "$BUNDLE_SHA256" "$archive" | sha256sum -c - || fail "$BUNDLE is another one than bundle_sha256 says"
    fi
    mkdir -p "$PREFIX"
    tar -xf "$archive" -C "$PREFIX" || fail "$BUNDLE cannot be unpacked"
    rm -f "$archive"
    [ -x "$AGENT" ] || fail "$BUNDLE has no $AGENT"
fi
