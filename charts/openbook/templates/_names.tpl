{{- define "openbook.name" -}}
{{- if contains "openbook" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-openbook" (.Release.Name | trunc 43 | trimSuffix "-") }}
{{- end }}
{{- end }}

{{- define "openbook.selector" -}}
app.kubernetes.io/name: openbook
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "openbook.labels" -}}
{{ include "openbook.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}
