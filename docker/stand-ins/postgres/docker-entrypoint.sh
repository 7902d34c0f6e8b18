#!/bin/sh
# What the official image does: make the data folder once, from POSTGRES_*, with a server on the socket alone; then run.
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    user=${POSTGRES_USER:-postgres}
    method=${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}
    if [ -z "${POSTGRES_PASSWORD:-}" ] && [ "$method" != trust ]; then
        echo "Error: set POSTGRES_PASSWORD, or POSTGRES_HOST_AUTH_METHOD=trust." >&2
        exit 1
    fi
    mkdir -p "$PGDATA" && chmod 700 "$PGDATA"
    secret=$(mktemp)
    printf '%s\n' "${POSTGRES_PASSWORD:-unused}" > "$secret"
    initdb --pgdata "$PGDATA" --username "$user" --pwfile "$secret" --auth-local trust --auth-host scram-sha-256 --encoding UTF8 --locale C
    rm "$secret"
    echo "host all all all $method" >> "$PGDATA/pg_hba.conf"
    if [ -n "${POSTGRES_DB:-}" ] && [ "$POSTGRES_DB" != postgres ]; then
        pg_ctl -D "$PGDATA" -w -o "-c listen_addresses='' -c unix_socket_directories=/tmp" start
        psql -h /tmp -U "$user" -d postgres -v ON_ERROR_STOP=1 -c "CREATE DATABASE \"$POSTGRES_DB\""
        pg_ctl -D "$PGDATA" -w stop
    fi
fi
[ "$1" = postgres ] || exec "$@"
shift
exec postgres -D "$PGDATA" -c listen_addresses='*' -c unix_socket_directories=/tmp "$@"
