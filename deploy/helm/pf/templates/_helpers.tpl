{{- /* Labels of every object: the name of the program as `name`, the context as `root`. */ -}}
{{- define "pf.labels" -}}
{{ include "pf.selector" . }}
app.kubernetes.io/part-of: pf
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- /* Labels by which objects find pods. */ -}}
{{- define "pf.selector" -}}
app.kubernetes.io/name: pf-{{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end -}}

{{- /* Names of hosts. */ -}}
{{- define "pf.dns" -}}
- to:
  - namespaceSelector: {}
    podSelector:
      matchLabels: {k8s-app: kube-dns}
  ports:
  - {protocol: UDP, port: 53}
  - {protocol: TCP, port: 53}
{{- end -}}

{{- /* Limits of every container of ours. */ -}}
{{- define "pf.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
