{{- /* The services, as the local stack starts them (deploy/local/stack_services.py). A beat file shows that a process without a port lives. */}}
{{- define "ft.components" -}}
api:
  command: [python, -m, control_plane.api]
  port: 8000
  keys: true
  more: true
  surge: true
  liveness: {httpGet: {path: /livez, port: main}}
  readiness: {httpGet: {path: /healthz, port: main}}
worker:
  command: [python, -m, control_plane.worker]
  keys: true
  signing: true
  more: true
  surge: true
  token: true
  beat: worker.alive
code-location:
  command: [dagster, api, grpc, --host, 0.0.0.0, --port, "3030", --location-name, ft, --module-name, ft_assets.definitions, --use-python-environment-entry-point, --log-format, json]
  port: 3030
  token: true
  surge: true
  account: dagster
  liveness: {grpc: {port: 3030, service: DagsterApi}}
  readiness: {grpc: {port: 3030, service: DagsterApi}}
dagster:
  command: [python, -m, deploy.local.dagster_web, /etc/ft/workspace.yaml, 0.0.0.0]
  values: dagsterWebserver
  port: 3000
  keys: true
  token: true
  surge: true
  account: dagster
  dagsterToken: true
  # The page to sign in is the only one without a key; other host names are refused.
  liveness: {httpGet: {path: /ft/login, port: main, httpHeaders: [{name: Host, value: "localhost:3000"}]}}
  readiness: {httpGet: {path: /ft/login, port: main, httpHeaders: [{name: Host, value: "localhost:3000"}]}}
daemon:
  command: [python, -m, deploy.local.supervisor.file_heartbeat, /var/lib/ft/daemon.beat, sensors.daemon, run, -w, /etc/ft/workspace.yaml, --log-format, json]
  values: dagsterDaemon
  token: true
  account: dagster
  dagsterToken: true
  beat: daemon.beat
{{- end }}

{{- /* The values of a component: (dict "root" $ "name" "..." "one" $component). */}}
{{- define "ft.componentValues" -}}
{{- toYaml (get .root.Values (.one.values | default (camelcase .name | untitle))) }}
{{- end }}
