#!/bin/sh
# Writes the files of the Secrets beside itself: new Redis passwords with the users of redis.acl, and the API key from
# OPENAI_API_KEY. A server without a key is sent one that it does not look at.
set -eu
umask 077
cd "$(dirname "$0")"
sed_program=
for user in master worker collector; do
    head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$user"
    digest=$(sha256sum < "$user" | cut -d' ' -f1)
    sed_program="$sed_program;s/{$user}/$digest/"
done
sed "${sed_program#;}" redis.acl > users.acl
printf '%s' "${OPENAI_API_KEY:-none}" > api-key
